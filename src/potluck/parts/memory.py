"""How much memory a net in stages takes to train, by stage, and how to cut it into pieces that fit a budget.

There are two measures, which differ. `MemoryModel` is the estimate of FeDepth's Table 1 (Zhang et al. 2023.
https://arxiv.org/abs/2303.04887): bytes of parameters, and twice the outputs of all modules for a batch, once forward
and once backward. `saved_bytes` measures what autograd really saves for the backward pass. The table is for batches of
32 and counts parameters once; a client's estimate is for its own batches, and counts each parameter with its gradient
and the optimiser's moments, and with what FedProx's pull holds of it, if there is one.

As in the table, a first stage that takes less than half as much as the second one counts nothing and is trained with
it: it is a stem. Otherwise it is a block like any other. Norms without other layers behind the last block, pooling and
head count nothing either: they are the classifier, which is trained with every piece.

So the whole net takes more than its blocks: PreResNet-20 with 10 classes 117.05 MiB, of which the nine blocks are
112.02, the stem 4.00, the last norm 1.00 and the head 0.02. The paper's 116.04 is the net with 100 classes without its
parameters, of which there are 1.05 MiB; its blocks are with theirs.

For convolutions with norms the table's factor of two is generous; a block that really keeps more than its estimate
counts with what it keeps: see `MemoryModel.step`.

Neither counts the data set; the weights of the whole network, which a client holds as received, in the network, and as
sent; Python and torch themselves; the workspace of torch's kernels, such as a convolution's reordered copies of its
inputs and outputs; and memory that the allocator retains.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.utils._pytree import tree_leaves

from potluck.core.ground.inputs import InputShape, one_shape
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.batchnorm import keep_statistics
from potluck.core.nets.entrance import blank_inputs
from potluck.core.nets.modes import mode
from potluck.core.requests.fit import LocalTraining
from potluck.models.stages import CutNet, Stages, stages_of

SCENARIOS = {
    "fair": (1 / 6, 1 / 3, 1 / 2, 1.0),
    "lack": (1 / 8, 1 / 6, 1 / 2, 1.0),
    "surplus": (1 / 6, 1 / 3, 1 / 2, 2.0),
}
"""The paper's budgets, as shares of what the whole net takes, each for a quarter of the clients."""

BATCH_SIZE = 32
SLACK = 1.05
"""The paper's own pieces exceed its budgets by up to 4.2 %; with 14 % or more the pieces would differ."""

# Containers are not layers; the paper's net calls ReLU as a function, which its estimate does not count.
UNCOUNTED = (nn.Sequential, nn.ModuleList, nn.ReLU, CutNet)


@dataclass(frozen=True)
class Part:
    """One stage, or pooling and head together: the estimate in bytes, and the shape of one example's output.

    Attributes:
        parameters: held once.
        activations: twice the outputs of all its modules for a batch.
        kept: for a batch, what autograd keeps for the backward pass and what comes out; without what goes in.
        largest: for a batch, of a single module's output.
        copies: how often the parameters are held in training.
    """

    name: str
    parameters: int
    activations: int
    output: Size
    kept: int
    largest: int
    copies: int

    @property
    def cost(self) -> int:
        """Bytes to train it."""
        return self.copies * self.parameters + self.activations


@dataclass(frozen=True)
class Piece:
    """The stages from `start` to before `stop`, trained together, at an estimated cost in bytes."""

    start: int
    stop: int
    cost: int


@dataclass(frozen=True)
class MemoryModel:
    """The paper's estimate for one net.

    Attributes:
        parts: the stages in order, then pooling and head as "head".
        blocks: from and to before which stage; what is never cut further. A stem is in the first.
        input: shape of one example.
        batch_size: examples a step.
        itemsize: bytes of a number of the input.
    """

    parts: tuple[Part, ...]
    blocks: tuple[tuple[int, int], ...]
    input: Size
    batch_size: int
    itemsize: int

    @classmethod
    def of(
        cls, net: nn.Module, input_shape: InputShape, batch_size: int = BATCH_SIZE, copies: int = 1
    ) -> "MemoryModel":
        """Run two examples through the net, as in training, and count.

        Args:
            net: which is left as it was.
            input_shape: of one example.
            batch_size: examples a step.
            copies: how often parameters count: once in the paper's table, see `parameter_copies` for training.
        """
        whole = stages_of(net)
        named = [(name, whole.between(number, number + 1)) for number, name in enumerate(whole.stages)]
        parts: list[Part] = []
        shape = one_shape(input_shape)
        x: Tensor = blank_inputs(net, shape, 2)
        itemsize = x.element_size()
        with isolated(Key(("memory",))):  # Dropout draws
            for name, module in (*named, ("head", whole.classifier)):
                with mode(module, training=True), keep_statistics(module):
                    x, written, kept = _watched(module, x)
                put_out, largest, kept = (count * batch_size // 2 for count in (sum(written), max(written), kept))
                held = sum(p.numel() * p.element_size() for p in module.parameters())
                parts.append(Part(name, held, 2 * put_out, x.shape[1:], kept, largest, copies))
        in_the_table = [part.parameters + part.activations / batch_size * BATCH_SIZE for part in parts]
        return cls(tuple(parts), _blocks(whole, in_the_table), Size(shape), batch_size, itemsize)

    @property
    def whole(self) -> int:
        """Bytes to train the whole net at once."""
        return max(sum(part.cost for part in self.parts), self.step(Piece(0, self.blocks[-1][1], 0)))

    @property
    def after(self) -> int:
        """How many stages behind the last block belong to the classifier."""
        return len(self.parts) - 1 - self.blocks[-1][1]

    @property
    def features(self) -> Size:
        """Shape of one example where the last block hands over to the classifier."""
        return self.parts[self.blocks[-1][1] - 1].output

    @property
    def costs(self) -> list[int]:
        """Bytes to train each block by itself."""
        return [self.cost(place, place + 1) for place in range(len(self.blocks))]

    def cost(self, first: int, last: int) -> int:
        """Bytes to train the blocks from `first` to before `last` together.

        Each counts as its last stage does, so that a stem counts nothing; or all count as a step holds, if more.
        """
        blocks = self.blocks[first:last]
        step = self.step(Piece(blocks[0][0], blocks[-1][1], 0))
        return max(sum(self.parts[stop - 1].cost for _, stop in blocks), step)

    def pieces(self, budget: float) -> list[Piece]:
        """The blocks packed into pieces of at most `budget` bytes; see `decompose`."""
        return [
            Piece(self.blocks[first][0], self.blocks[last - 1][1], self.cost(first, last))
            for first, last in decompose(self.costs, budget, self.cost)
        ]

    def training(self, piece: Piece) -> int:
        """Bytes to train a piece, with what its cost leaves out: the stem, the classifier, a batch of its inputs."""
        activations = sum(part.activations for part in self._trained_with(piece))
        estimated = self.held(piece) + activations + self.batch_size * self.example(piece.start)
        return max(estimated, self.step(piece))

    def step(self, piece: Piece) -> int:
        """Bytes that a step of training a piece holds, as its parts were seen to keep them.

        Parameters in all their copies, the batch as it comes and as the piece reads it, what is kept for the backward
        pass, what the classifier reads if a link makes it, and the gradients of the largest output and of what it was
        computed from.
        """
        trained = self._trained_with(piece)
        linked = self.parts[piece.stop - 1].output != self.features
        read = self.example(piece.start) + linked * self.example(len(self.parts) - 1 - self.after)
        read += (piece.start > 0) * self.example(0)
        kept = sum(part.kept for part in trained) + 2 * max(part.largest for part in trained)
        return self.held(piece) + kept + self.batch_size * read

    def held(self, piece: Piece) -> int:
        """Bytes of the parameters that are trained with a piece, in all their copies."""
        return sum(part.copies * part.parameters for part in self._trained_with(piece))

    def _trained_with(self, piece: Piece) -> tuple[Part, ...]:
        return *self.parts[piece.start : piece.stop], *self.parts[len(self.parts) - 1 - self.after :]

    def example(self, start: int) -> int:
        """Bytes of what the stage in this place reads of one example."""
        if not start:
            return self.input.numel() * self.itemsize
        return self.parts[start - 1].output.numel() * torch.get_default_dtype().itemsize

    def forward(self, stop: int) -> int:
        """Bytes that one example takes at most on its way through the stages before `stop`, forward only."""
        put_out = [part.activations // (2 * self.batch_size) for part in self.parts[:stop]]
        through = (self.example(place) + count for place, count in enumerate(put_out))
        return self.example(0) + self.example(stop) + max(through, default=0)

    def at_once(self, stop: int, room: float) -> int:
        """How many examples of a batch may pass the stages before `stop` together, forward only, in so many bytes."""
        return max(1, min(self.batch_size, int(room // self.forward(stop))))


def decompose(
    costs: Sequence[float], budget: float, together: Callable[[int, int], float] | None = None
) -> list[tuple[int, int]]:
    """Pack costs in order: a piece grows as long as it stays within the budget.

    Leading costs are left out as far as the last one that alone exceeds the budget, so the first piece need not
    start at 0 (FeDepth's partial training).

    Args:
        costs: bytes of each block.
        budget: bytes that a piece may take.
        together: bytes of the blocks from one position to before another; the sum of their costs by default.

    Returns:
        From and to before which position each piece goes.

    Raises:
        ValueError: not even the last fits.
    """
    if costs[-1] > budget:
        raise ValueError(
            f"budget of {size_text(budget)}: too small for any piece; expected at least"
            f" {size_text(costs[-1], enough=True)}, which the last block takes, or"
            f" {size_text(max(costs), enough=True)} to train every block"
        )
    first = max((place + 1 for place, cost in enumerate(costs) if cost > budget), default=0)
    starts = [first]

    def of_piece(start: int, stop: int) -> float:
        return sum(costs[start:stop]) if together is None else together(start, stop)

    for place in range(first + 1, len(costs)):
        if of_piece(starts[-1], place + 1) > budget:
            starts.append(place)
    return list(zip(starts, [*starts[1:], len(costs)], strict=True))


def parameter_copies(training: LocalTraining) -> int:
    """Copies of a parameter in training: itself, its gradient, and the optimiser's state of it."""
    weight = nn.Parameter(torch.zeros(8, 8))
    weight.grad = torch.zeros_like(weight)
    optimizer = training.new_optimizer([weight])
    optimizer.step()
    moments = [found for found in optimizer.state[weight].values() if isinstance(found, Tensor)]
    return 2 + math.ceil(sum(found.numel() for found in moments if found.dim()) / weight.numel())


def bypassed(stages: Stages, pieces: list[Piece], memory: MemoryModel) -> tuple[Stages, list[Piece], MemoryModel]:
    """A net, its pieces and its estimate without the stages that do not fit; the stem joins the first piece.

    Raises:
        ValueError: there is no stem, or its output has not the shape that the first piece reads.
    """
    names, start = stages.stages, pieces[0].start
    given, read = memory.parts[0].output, memory.parts[start - 1].output
    if memory.blocks[0] == (0, 1):
        raise ValueError(
            f"partial: found 'bypass', but {names[0]} takes at least half as much memory as {names[1]};"
            " expected a smaller stem, or partial='freeze'"
        )
    if given != read:
        raise ValueError(
            f"partial: found 'bypass', but {names[0]} returns {tuple(given)} and {names[start]} reads"
            f" {tuple(read)}; expected equal shapes, or partial='freeze'"
        )
    shifted = [replace(piece, start=piece.start - start + 1, stop=piece.stop - start + 1) for piece in pieces]
    shifted[0] = replace(shifted[0], start=0)
    blocks = tuple((first - start + 1, stop - start + 1) for first, stop in memory.blocks if first >= start)
    left = replace(memory, parts=(memory.parts[0], *memory.parts[start:]), blocks=((0, blocks[0][1]), *blocks[1:]))
    return stages.without(1, start), shifted, left


def saved_bytes(net: nn.Module, inputs: Tensor) -> int:
    """Bytes that a training step on `inputs` keeps for the backward pass, parameters and buffers apart.

    Every storage counts once, however many operations saved a view of it. The net is unchanged afterwards.
    """
    with isolated(Key(("saved bytes",))), mode(net, training=True), keep_statistics(net):  # Dropout draws
        _, saved = _saved(net, inputs)
    return sum(storage.nbytes() for storage in saved.values())


def size_text(count: float, *, enough: bool = False) -> str:
    """Bytes as text in MiB, small ones in KiB; the papers and torch's tools call 2^20 bytes a megabyte.

    Args:
        count: of bytes.
        enough: whether to round up, so that the stated amount suffices.
    """
    unit, name = (2**20, "MiB") if count >= 2**17 else (2**10, "KiB")
    shown = math.ceil(count / unit * 100) / 100 if enough else count / unit
    return f"{shown:.2f} {name}"


def _blocks(net: Stages, costs: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Stages that are never cut: the stem with its successor, and every other by itself.

    The costs are those of the paper's table, so that what a block is depends on the net alone.
    """
    end = len(net.stages)
    while end > 1 and net.is_norm(end - 1):
        end -= 1
    singles = [(place, place + 1) for place in range(end)]
    has_stem = end > 1 and 2 * costs[0] < costs[1]
    return ((0, 2), *singles[2:]) if has_stem else tuple(singles)


def _watched(module: nn.Module, x: Tensor) -> tuple[Tensor, list[int], int]:
    """The module's output, the output bytes of it and of each inner module, and what it saves except its input."""
    written: list[int] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        written.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    hooks = [m.register_forward_hook(note) for m in module.modules() if not isinstance(m, UNCOUNTED)]
    try:
        output, kept = _saved(module, x.detach().requires_grad_(x.is_floating_point()))
    finally:
        for hook in hooks:
            hook.remove()
    kept[output.untyped_storage().data_ptr()] = output.untyped_storage()
    kept.pop(x.untyped_storage().data_ptr(), None)
    return output.detach(), written or [0], sum(storage.nbytes() for storage in kept.values())


def _saved(net: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[int, torch.UntypedStorage]]:
    """The net's output, and by address what autograd saves for the backward pass, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # kept, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output: Tensor = net(inputs)
    return output, {pointer: storage for pointer, storage in kept.items() if pointer not in own}
