"""A rehearsal: every network on two examples, so that one that cannot be trained is reported before the first round."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from potluck.core.federation import Federation
from potluck.core.ground.errors import ConfigError, explained
from potluck.core.ground.inputs import by_name, shown
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.classes import own_classes_of, own_outputs, spread_outputs
from potluck.core.nets.soundness import UNREPEATED, advice_on_size, repeats
from potluck.core.nets.weights import parameters_of, tensors_of
from potluck.core.requests.examples import Batch, Examples


def rehearse(federation: Federation, *, common_test: bool = True) -> None:
    """Evaluate and train a copy of each architecture, the server's too, on two examples of its own.

    It is also evaluated on examples of every other shape that it will have to read: of its clients' parts, of the
    public examples, and with `common_test` of the common test set.

    There are no side effects: the copies are discarded, and no random stream advances. Architectures whose clients'
    data are on other machines are left out.

    Raises:
        ConfigError: an architecture raises on its inputs, or does not return finite logits (batch, classes), or has
            no gradient.
    """
    trained = {site.architecture: site.train for site in federation.looked_at.values() if _is_here(site.train)}
    for name, examples in sorted(trained.items()):
        _Rehearsal(federation, name, _two_of(examples)).execute(trains=True)
    _rehearse_other_shapes(federation, trained, common_test)
    server = federation.server_architecture
    common = [examples for examples in (federation.public, federation.test, *trained.values()) if _is_here(examples)]
    if server not in trained and common:
        _Rehearsal(federation, server, _two_of(common[0])).execute(trains=False)


def _rehearse_other_shapes(federation: Federation, trained: Mapping[str, Examples], common_test: bool) -> None:
    """Evaluate each architecture on examples of shapes that it was not trained on."""
    shapes: dict[tuple[int, int], str] = {}

    def shape(examples: Examples) -> str:
        stored = id(examples.inputs), id(examples.preprocess)
        if stored not in shapes:
            shapes[stored] = shown(examples.input_shape)
        return shapes[stored]

    seen = {(name, shape(examples)) for name, examples in trained.items()}
    for name, examples, whose in _to_read(federation, trained, common_test):
        if _is_here(examples) and (name, shape(examples)) not in seen:
            seen.add((name, shape(examples)))
            _Rehearsal(federation, name, _two_of(examples), f" {whose}").execute(trains=False)


def _to_read(federation: Federation, names: Iterable[str], common_test: bool) -> Iterator[tuple[str, Examples, str]]:
    """Each architecture with the examples that it will have to read, and whose they are."""
    here = {client: site for client, site in sorted(federation.looked_at.items()) if _is_here(site.train)}
    for client, site in here.items():
        for part, examples in (("training", site.train), ("validation", site.validation), ("test", site.test)):
            yield site.architecture, examples, f"of client {client}'s {part} part"
    common = {
        "of the common test set": federation.test if common_test else None,
        "of the public data": federation.public,
    }
    for whose, examples in common.items():
        if examples is not None:
            yield from ((name, examples, whose) for name in names)


def _is_here(examples: Examples | None) -> bool:
    return examples is not None and examples.are_here


def _two_of(examples: Examples | None) -> Batch:
    """The first two examples, or the only one twice, since one alone has no batch statistics."""
    assert examples is not None
    return examples.batch(torch.tensor([0, min(1, len(examples) - 1)]))


class _Rehearsal:
    """One architecture on one batch."""

    def __init__(self, federation: Federation, name: str, batch: Batch, whose: str = "") -> None:
        self._federation = federation
        self._whose = whose
        self._name = name
        self._inputs, self._targets, _ = batch
        # Errors in the data are not the network's.
        self._sound = all(bool(tensor.isfinite().all()) for tensor in by_name(self._inputs).values())

    def execute(self, trains: bool) -> None:
        """In evaluation mode, then in training mode with the gradient of the loss if the architecture `trains`."""
        key = Key(("rehearsal", self._name))
        net = self._federation.build(self._name, key)
        self._check_real(net)
        built = tensors_of(net).keys()
        with isolated(key):
            with torch.no_grad():
                self._logits(net.eval(), "in evaluation mode")
            if not repeats(net, self._inputs):
                raise self._wrong(UNREPEATED)
            logits = self._logits(net.train(), "in training mode")
            if made := [name for name in tensors_of(net) if name not in built]:
                raise self._wrong(f"its forward makes {made[0]}, which is not trained or sent; make it in __init__")
            if trains:
                self._check_gradient(net, logits)

    def _logits(self, net: nn.Module, when: str) -> Tensor:
        """The network's outputs, which are logits of the right shape."""
        try:
            with own_outputs(net):
                outputs: object = net(self._inputs)
        except Exception as error:  # the user's own code
            found = f"cannot read inputs {self._shape}{self._whose} {when}: {explained(error)}"
            raise self._wrong(f"{found}{advice_on_size(net, self._inputs)}") from error
        task, own = self._federation.task, own_classes_of(net)
        width = self._federation.num_classes if own is None else len(own.numbers)
        wanted = task.output_shape(self._inputs, width)
        expected = f"{'logits' if task.has_classes else 'outputs'} of shape (batch, {', '.join(map(str, wanted[1:]))})"
        if not isinstance(outputs, Tensor):
            raise self._wrong(f"returns {type(outputs).__name__}; expected {expected}: {_advice(outputs)}")
        if tuple(outputs.shape) != wanted:
            found = f"returns a tensor of shape {_shown(outputs)}"
            per = (
                "one output a class" if task.has_classes else f"{width} output{'s' if width > 1 else ''} ({task.name})"
            )
            raise self._wrong(f"{found}; expected {expected}: give its last layer {per}")
        if not outputs.is_floating_point():
            raise self._wrong(f"returns {outputs.dtype}; expected {expected}, of floating point")
        if self._sound and not outputs.isfinite().all():
            raise self._wrong(f"returns NaN or infinity {when}, with its first weights; expected finite logits")
        return spread_outputs(net, outputs)

    @property
    def _shape(self) -> str:
        if isinstance(self._inputs, Tensor):
            return f"of shape {_shown(self._inputs)}"
        return ", ".join(f"{name} {_shown(tensor)}" for name, tensor in self._inputs.items())

    def _check_real(self, net: nn.Module) -> None:
        """Check that no trained weight is complex, which neither averages nor all optimisers know."""
        for name, weight in parameters_of(net).items():
            if weight.is_complex():
                kind = str(weight.dtype).removeprefix("torch.")
                raise self._wrong(f"{name} is {kind}; expected real numbers: keep its real and imaginary part apart")

    def _check_gradient(self, net: nn.Module, logits: Tensor) -> None:
        """Check that the loss can be computed and has a gradient."""
        try:
            loss = self._federation.criterion(logits, self._targets)
        except Exception as error:
            found = f"logits {_shown(logits)} and targets {_shown(self._targets)}, {self._targets.dtype}"
            raise self._wrong(f"the loss cannot be taken of {found}: {explained(error)}") from error
        if not loss.requires_grad:
            raise self._wrong("the loss depends on no parameter that can be trained; expected one with requires_grad")
        try:
            loss.backward()
        except Exception as error:
            raise self._wrong(f"the loss has no gradient: {explained(error)}") from error
        gradients = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
        for name, gradient in gradients.items():
            if gradient.layout != torch.strided:
                raise self._wrong(f"the gradient of {name} is sparse; expected a dense one: leave out sparse=True")
            if self._sound and not gradient.isfinite().all():
                raise self._wrong(f"the gradient of {name} is NaN or infinite, with the first weights and two examples")

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"model {self._name}: {problem}")


def _shown(tensor: Tensor) -> str:
    """The shape of a tensor, its first axis as the batch if it is as long as the batch."""
    sizes = ["batch" if position == 0 and size == 2 else str(size) for position, size in enumerate(tensor.shape)]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def _advice(outputs: object) -> str:
    """Advice on how to return logits instead."""
    if isinstance(outputs, Mapping):
        return "return the one entry that holds the logits, or call it logits"
    return "return the logits alone"
