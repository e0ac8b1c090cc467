"""A network that is cut by its dataflow, from one of its places to another, and with exits behind places."""

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from potluck.core.ground.inputs import Inputs
from potluck.core.nets.classes import alone
from potluck.core.nets.splitting import CannotSplit, Place, plan_of, pruned


class TokenMean(nn.Module):
    """Mean over all positions where channels come last: (batch, ..., channels) to (batch, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens, or of a map that has its channels behind height and width."""
        return x.flatten(1, -2).mean(1)


class CutNet(nn.Module):
    """A network from one of its places to another, by its own `forward`, with those of its tensors that are read there.

    They are the network's own, and have their names in it. What else belongs to it has no public name here, since the
    modules of a network may have any. Behind places it can have exits, as `exits`, and it can end in one.

    Args:
        net: whose plan is known.
        start: where inputs come in; where the network has them, if None.
        stop: where it ends; with its outputs, if None.
        exits: by names of stages; if there is one at `stop`, it makes the outputs.

    Raises:
        ConfigError: a module of the network has the name that exits have, or it cannot run from `start` without what
            lies before it.
    """

    def __init__(
        self,
        net: nn.Module,
        start: Place | None = None,
        stop: Place | None = None,
        exits: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        plan = plan_of(net)
        if start is not None and start.by_value:
            raise CannotSplit(
                f"{type(net).__name__} looks at numbers before {start}, so that it cannot begin there; use a method"
                " that begins at the inputs, such as fedavg or fedproto"
            )
        if exits and "exits" in dict(net.named_children()):
            raise CannotSplit(f"{type(net).__name__} has a module called exits, as what is put behind stages is called")
        self._plan = plan
        self._start, self._stop = start, stop
        tensors = (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False))
        names = plan.names(start, stop) if start or stop else {name for name, _ in tensors}  # those not saved, too
        own = alone(pruned(net, names))  # outputs are made those of all classes by who ends in them
        self.__dict__["_own"] = own  # as no module of this one, whose tensors would have longer names
        self._modules.update(own._modules)
        for held in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[held] = own.__dict__[held]
        self._places = {stage.name: stage.end for stage in plan.stages if stage.name in (exits or {})}
        self._ending = next((name for name, place in self._places.items() if place == stop), None)
        if exits:
            self._modules["exits"] = nn.ModuleDict({name: exits[name] for name in self._places})
        if not net.training:
            self.eval()  # else its layers would seem to be held in that mode

    def forward(self, x: Inputs) -> Tensor:
        """What the network has at `start`, (batch, ...), to its outputs or those of the exit that it ends in."""
        self._own.training = self.training
        found = self._plan.course.run(self._own, x, self._start, self._stop)
        return found if self._ending is None else self._exit(self._ending, found)

    def exit_outputs(self, x: Inputs) -> dict[str, Tensor]:
        """Of inputs (batch, ...) the outputs of all exits by place, in order; the last are those of `forward`.

        Those are called "head" unless the net ends in an exit.
        """
        self._own.training = self.training
        before = {place: name for name, place in self._places.items() if name != self._ending}

        def exit_at(place: Place, h: Tensor) -> Tensor:  # on the way, as a staged net does: gradients add up in order
            return self._exit(before[place], h)

        *found, last = self._plan.course.at(self._own, x, *before, stop=self._stop, read=exit_at)
        outputs = dict(zip(before.values(), found, strict=True))
        return {**outputs, self._ending or "head": last if self._ending is None else self._exit(self._ending, last)}

    @property
    def _own(self) -> nn.Module:
        return self.__dict__["_own"]

    def _exit(self, place: str, h: Tensor) -> Tensor:
        exits = cast(nn.ModuleDict, self._modules["exits"])
        return exits[place](h)

    @property
    def own_head(self) -> list[nn.Module]:
        """The layers that put out what the network does; none if it ends before."""
        if self._stop is not None:
            return []
        behind = [name for count, name in self._plan.uses if count >= self._plan.features.count]
        return [self.get_submodule(path) for path in dict.fromkeys(name.rpartition(".")[0] for name in behind)]

    def extra_repr(self) -> str:
        """From where to where it goes."""
        return f"from {self._start or 'inputs'} to {self._stop or 'outputs'}"
