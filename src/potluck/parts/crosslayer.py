"""Internal cross-layer gradients: the server mixes each deep layer's update with that of a shallow layer like it.

Chan, Zhou, Zhao, Jiang, Ngai. ICLR 2024. https://arxiv.org/abs/2308.11464, section 3 and Algorithm 1.

Deep layers differ more from client to client than shallow ones. So the server takes each layer's aggregated update
apart from the method that made it, and gives deep layers a share of the direction of a shallow layer of their shape.
Clients notice nothing, which is why this works over any method that moves weights on the server.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Size, Tensor, nn

from potluck.core.ground.fields import Checked, above, at_least, require
from potluck.core.ground.inputs import InputShape
from potluck.core.needs import Need, Offer, Problem
from potluck.core.nets.batchnorm import BATCH_NORMS
from potluck.core.nets.splitting import plan_of, split_problem
from potluck.core.nets.weights import Weights
from potluck.core.roles import Cohort, Server
from potluck.models.contract import Blocks, StagedNet
from potluck.models.stages import stages_of
from potluck.parts.sharing import GroupWeights, HasWeights, SharesWeights

EPSILON = 1e-7  # what the authors' code adds to what it divides by

LayerKind = tuple[type[nn.Module], Size]
Blocked = Sequence[Sequence[tuple[str, LayerKind]]]
"""Of each block of a net, name and kind of each weight that may be mixed."""


def across_blocks(net: nn.Module, input_shape: InputShape = ()) -> dict[str, str]:
    """By name, the weights that are mixed, and with which: the last of its type and shape in the first block with one.

    In a ResNet these are the convolutions of all blocks of a stage but the first, and the second convolution of that
    one, as in the authors' code: from stage to stage shapes differ.
    """

    def paired(blocks: Blocked) -> dict[str, str]:
        pairs, sources = dict[str, str](), dict[LayerKind, str]()
        for found in blocks:
            pairs |= {name: sources[kind] for name, kind in found if kind in sources}
            sources |= {kind: name for name, kind in found if kind not in sources}
        return pairs

    return _first_pairs(net, paired)


def inside_blocks(net: nn.Module, input_shape: InputShape = ()) -> dict[str, str]:
    """By name, the weights that are mixed, and with which: the first of its type and shape in the same block.

    In a transformer that is the second norm of each block, and its first, as in the authors' code.
    """

    def paired(blocks: Blocked) -> dict[str, str]:
        pairs = dict[str, str]()
        for found in blocks:
            sources = dict[LayerKind, str]()
            pairs |= {name: sources[kind] for name, kind in found if sources.setdefault(kind, name) != name}
        return pairs

    return _first_pairs(net, paired)


@dataclass(frozen=True)
class CrossLayer(Checked):
    """How updates are mixed: g = (g_k / |g_k| + theta g_0 / |g_0|) (|g_k| + |g_0|) / 2, each entry limited.

    g_k is the update of a deep layer, g_0 that of its shallow one; alpha = <g_0, g_0>, beta = <g_0, g_k>.

    Attributes:
        rule: theta is |beta| / alpha, at most `cap`, in the authors' code ("released"); -beta / alpha in Algorithm 1
            ("paper"); this only where beta is negative in the theorem, eq. 2 ("theorem"); and 1 in the ablation
            without optimisation ("sum").
        normalise: False leaves norms out, g = g_k + theta g_0, as in the ablation without normalisation.
        granularity: norms and products are those of each "kernel" of a convolution, as in the code, or of the whole
            "tensor", as those of other layers always are. By kernel, 1 x 1 convolutions are not mixed, since a
            kernel of one weight has no direction but its sign.
        pairs: "across" blocks mixes a layer with one of an earlier block, see `across_blocks`; "inside" with an earlier
            one of its own block, see `inside_blocks`.
        cap: limit of theta under "released".
        clip: limit of each entry of g.
    """

    rule: Literal["released", "paper", "theorem", "sum"] = "released"
    normalise: bool = True
    granularity: Literal["kernel", "tensor"] = "kernel"
    pairs: Literal["across", "inside"] = "across"
    cap: Annotated[float, at_least(0)] = 5.0
    clip: Annotated[float, above(0)] = 0.1

    def need(self) -> Need:
        """That there is something to mix."""
        advice = "choose models with such layers, or the method without InCo, such as fedavg"
        return Need(f"two layers of one type and shape in {self._where}", self._nothing_in, advice)

    def pairs_of(self, server: Server, architectures: Iterable[str]) -> dict[str, str]:
        """The pairs of all layers of these architectures; where they disagree, those of the last."""
        found = [server.about(name, self._question) for name in architectures]
        return {deep: shallow for pairs in found for deep, shallow in pairs.items()}

    def mixes(self, shape: Size) -> bool:
        """Whether it mixes updates of this shape."""
        return self.granularity == "tensor" or len(shape) < 3 or shape[2:].numel() > 1

    def mixed(self, deep: Tensor, shallow: Tensor) -> Tensor:
        """g, of the updates g_k and g_0 of one shape."""
        dims = tuple(range(2 if self.granularity == "kernel" and deep.dim() > 2 else 0, deep.dim()))
        alpha, beta = ((shallow * other).sum(dims, keepdim=True) for other in (shallow, deep))
        theta = self._theta(alpha, beta)
        if not self.normalise:
            return (deep + theta * shallow).clamp(-self.clip, self.clip)
        norms = [torch.linalg.vector_norm(update, dim=dims, keepdim=True) for update in (deep, shallow)]
        direction = deep / (norms[0] + EPSILON) + theta * shallow / (norms[1] + EPSILON)
        return (direction * (norms[0] + norms[1]) / 2).clamp(-self.clip, self.clip)

    def moved(self, before: Weights, after: Weights, pairs: Mapping[str, str]) -> Weights:
        """The weights after a round whose updates are mixed; where either of a pair has not moved, as they were."""
        moves = {name: after[name] - before[name] for name in {*pairs, *pairs.values()} if name in after}
        moved = {name for name, move in moves.items() if move.any()}
        both = [(deep, shallow) for deep, shallow in pairs.items() if deep in moved and shallow in moved]
        both = [(deep, shallow) for deep, shallow in both if self.mixes(moves[deep].shape)]
        return {**after, **{deep: before[deep] + self.mixed(moves[deep], moves[shallow]) for deep, shallow in both}}

    @property
    def _question(self) -> Callable[[nn.Module, InputShape], dict[str, str]]:
        return across_blocks if self.pairs == "across" else inside_blocks

    @property
    def _where(self) -> str:
        return "different blocks" if self.pairs == "across" else "one block"

    def _mixed_of(self, offer: Offer) -> list[Size]:
        """The shapes of what it pairs in the networks, of those that it mixes."""
        pairs = ((net, deep) for net in offer.nets.values() for deep in self._question(net, ()))
        return [shape for net, deep in pairs if self.mixes(shape := net.get_parameter(deep).shape)]

    def _nothing_in(self, offer: Offer) -> Problem | None:
        if self._mixed_of(offer):
            return None
        ways = {"granularity": "tensor", "pairs": "inside" if self.pairs == "across" else "across"}
        ways = {key: value for key, value in ways.items() if replace(self, **{key: value})._mixed_of(offer)}
        but = " but 1 x 1 convolutions" if "granularity" in ways else ""
        found = f"it mixes the updates of two layers of one type and shape in {self._where}, and there are none{but} in"
        advice = [f"choose models with such layers, or method.inco.{key} = {value!r}" for key, value in ways.items()]
        problem = f"{found} {', '.join(offer.nets)}"
        return (problem, advice[0]) if advice else problem

    def _theta(self, alpha: Tensor, beta: Tensor) -> Tensor:
        if self.rule == "released":
            return (beta.abs() / (alpha + EPSILON)).clamp(max=self.cap)
        if self.rule == "sum":
            return torch.ones_like(beta)
        theta = torch.where(alpha > 0, -beta / alpha, 0.0)
        return theta.clamp(min=0.0) if self.rule == "theorem" else theta


class StateWithWeights(HasWeights, Protocol):
    """A method's state, a dataclass, with the server's weights."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


P = TypeVar("P", bound=StateWithWeights)


@dataclass(frozen=True)
class InCo(SharesWeights[P]):
    """What makes a method an InCo one: in front of it among the bases of a class, it mixes what each round did.

    Attributes:
        inco: how updates are mixed.
    """

    inco: CrossLayer = CrossLayer()

    mixes_layers = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.sharing.averages, "sharing.scope", "one that averages", self.sharing.scope)

    def needs(self) -> frozenset[Need]:
        """Those of the method, and layers to mix."""
        return super().needs() | {self.inco.need()}

    def round(self, state: P, cohort: Cohort, server: Server) -> P:
        """The method's round, after which its updates are mixed."""
        after = super().round(state, cohort, server)
        pairs = {group: self.inco.pairs_of(server, names) for group, names in self._architectures(server).items()}
        pool: GroupWeights = {g: self.inco.moved(state.weights[g], after.weights[g], pairs[g]) for g in after.weights}
        return replace(after, weights=pool)

    def _architectures(self, server: Server) -> dict[str, list[str]]:
        """By group, its members' architectures, the largest last."""
        size: dict[str, int] = {}
        found: dict[str, set[str]] = {}
        for member in server.roster.values():
            size[member.architecture] = sum(shape.numel() for shape in member.shapes.values())
            found.setdefault(self.sharing.group(member), set()).add(member.architecture)
        return {group: sorted(names, key=lambda name: (size[name], name)) for group, names in found.items()}


def _first_pairs(net: nn.Module, paired: Callable[[Blocked], dict[str, str]]) -> dict[str, str]:
    """The pairs of a staged net's blocks; of another net's children or, if these have none, of its stages."""
    if isinstance(net, StagedNet):
        return paired([_weights(net, block) for block in _blocks(net)])
    children = paired([_weights(net, name) for name, _ in net.named_children()])
    return children or paired(_by_stage(net))


def _blocks(net: StagedNet) -> list[str]:
    """Names of a staged net's blocks: those of its stages, or stages that have none, without the head and exits."""
    found: list[str] = []
    for name, stage in net.named_stages().items():
        parts = [f"{name}.{part}" for part, _ in stage.named_children()] if isinstance(stage, Blocks) else [name]
        found += [f"stages.{part}" for part in parts]
    return found


def _weights(net: nn.Module, block: str) -> list[tuple[str, LayerKind]]:
    """Name and kind of each trained weight in a block: those of layers, without biases and without BatchNorm."""
    found: list[tuple[str, LayerKind]] = []
    for name, layer in net.get_submodule(block).named_modules(prefix=block):
        weight = layer._parameters.get("weight")
        if weight is not None and weight.requires_grad and not isinstance(layer, BATCH_NORMS):
            found.append((f"{name}.weight", (type(layer), weight.shape)))
    return found


def _by_stage(net: nn.Module) -> Blocked:
    """The same of a net's stages by its dataflow; nothing if it has none that can be told apart."""
    if split_problem(net) is not None or plan_of(net).stages_problem:
        return []
    weights = _weights(net, "")
    return [[one for one in weights if one[0] in names] for names in stages_of(net).names().values()]
