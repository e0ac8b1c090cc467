"""What a model's table says of any network: a file of its initial weights, and which of its modules are trained.

The file holds tensors by name, as `net.state_dict()` gives them: `.safetensors`, or torch's `.pt`, `.pth` and `.bin`,
of which nothing but tensors is read. Those are loaded whose name and shape the network has, and what the file lacks
begins as it is drawn. Where all of its names begin with `model.` or `module.`, and none is the network's, the prefix is
left out. A tensor of the head may have another shape, since the task has other classes; any other one is refused, since
a network of which only a part was loaded looks like one that was loaded.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from potluck.core.ground.access import entered
from potluck.core.ground.digest import digest
from potluck.core.ground.errors import ConfigError, PotluckWarning, explained, nearest
from potluck.core.ground.inputs import InputShape
from potluck.core.nets.entrance import embeds, with_entrance
from potluck.core.nets.scale import collecting_options, collects_options, cutting_at
from potluck.core.nets.splitting import CannotSplit, Splits
from potluck.core.nets.weights import Weights, frozen_names, load, tensors_of
from potluck.models.contract import StagedNet, classifier_of
from potluck.models.split import split

HEAD = "head"
"""In `train_only`, the head as `head_names` finds it, whatever its module is called."""

_PREFIXES = ("model.", "module.")  # of Lightning, and of torch's DataParallel
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_EXPECTED = f"expected a file of tensors by name: {', '.join(_SUFFIXES)}"
_STATISTICS = (".running_mean", ".running_var")
_SHOWN = 3  # names in a message


class Begun:
    """A builder whose nets begin with the tensors of a file, and of which some modules alone are trained.

    Nets of another scale begin with the leading slices of the file's tensors, as they do of the full net's.

    Args:
        build: makes the nets.
        net: one that it has made at full size, on which all is checked; it is changed.
        where: names the model in messages.
        input_shape: of one example, or of each of the named inputs.
        weights: the file; None if nets begin as they are drawn.
        train_only: names of the modules that are trained, and `HEAD`; none if the builder's own choice stands.
        cut: where the nets are cut, which says what the head is; see `potluck.core.nets.splitting.make_plan`.

    Raises:
        ConfigError: the file cannot be read or does not fit, a name is of no module, nothing is left to train, or what
            is frozen begins as it is drawn, since the file lacks it.
    """

    def __init__(
        self,
        build: Callable[..., nn.Module],
        net: nn.Module,
        where: str,
        input_shape: InputShape,
        *,
        weights: str | None = None,
        train_only: Sequence[str] = (),
        cut: tuple[str, ...] = (),
    ) -> None:
        self._build, self._where, self._train_only = build, where, tuple(train_only)
        self._input_shape, self._cut = input_shape, cut
        self.__signature__ = inspect.signature(build)  # says whether it takes a scale
        cutting_at(self, cut)
        if collects_options(build):
            collecting_options(self)
        self._loaded: Weights = {} if weights is None else self._fitting(net, weights)
        self._check_names(net)
        self._head = self._head_of(net) if HEAD in self._train_only else frozenset[str]()
        self._begin(net)
        if weights is not None:
            self._check_whole(net, weights)

    def __call__(self, **options: Any) -> nn.Module:
        """A new net."""
        return self._begin(self._build(**options))

    def _begin(self, net: nn.Module) -> nn.Module:
        if self._loaded:
            own: Weights = net.state_dict(keep_vars=True)
            fitting = {name: _leading(tensor, own[name]) for name, tensor in self._loaded.items() if name in own}
            try:
                load(net, fitting, partial=True)
            except ValueError as problem:  # one tensor of two names that has two values
                raise ConfigError(f"{self._where}: weights: {problem}") from problem
        if self._train_only:
            _hold(net, self._trained(net))
            if not any(parameter.requires_grad for parameter in net.parameters()):
                raise ConfigError(
                    f"{self._where}: train_only: found {', '.join(self._train_only)}, in which nothing is trained;"
                    " expected a module with weights that its builder has not frozen"
                )
        return net

    def _trained(self, net: nn.Module) -> set[int]:
        """Which tensors lie in modules that are trained, by `id`."""
        modules = dict(net.named_modules())
        kept = [modules[name] for name in self._train_only if name in modules and name != HEAD]
        found = {id(tensor) for module in kept for tensor in (*module.parameters(), *module.buffers())}
        if HEAD in self._train_only:
            named = _names_of_ending(net) if isinstance(net, StagedNet) else self._head
            found |= {id(tensor) for name, tensor in tensors_of(net).items() if name in named}
        return found

    def _head_of(self, net: nn.Module) -> frozenset[str]:
        """The head's tensors in the full net.

        Raises:
            ConfigError: it cannot be found.
        """
        try:
            return head_names(net, self._input_shape, self._cut)
        except ConfigError as problem:
            raise ConfigError(f"{self._where}: its head is not known: {problem}") from problem

    def _check_names(self, net: nn.Module) -> None:
        known = {name for name, _ in net.named_modules() if name}
        for name in self._train_only:
            if name != HEAD and name not in known:
                near = ", ".join(nearest(name, known)) or "none"
                raise ConfigError(
                    f"{self._where}: train_only: found {name!r}, which is no module of {type(net).__name__}; expected"
                    f" {HEAD!r} or names of modules; nearest: {near}"
                )

    def _fitting(self, net: nn.Module, file: str) -> Weights:
        """The file's tensors that are the net's, by its names; those that are left out are said in a warning."""
        own: Weights = net.state_dict(keep_vars=True)
        found = _named_as(own, tensors_in(file))
        fits = {name: tensor for name, tensor in found.items() if name in own and own[name].shape == tensor.shape}
        other = [name for name in found if name in own and name not in fits]
        if other and (strange := [name for name in other if name not in self._head_or_nothing(net)]):
            raise ConfigError(
                f"{self._where}: weights: {file}: {strange[0]} has the shape {tuple(found[strange[0]].shape)}; expected"
                f" {tuple(own[strange[0]].shape)}, as the network has it: only tensors of the head may have another,"
                " and begin as drawn"
            )
        if not fits:
            raise ConfigError(
                f"{self._where}: weights: {file}: none of its {len(found)} tensors is one of the network's"
                f" {len(own)}; found {_some(found)}; expected {_some(own)}"
            )
        self._say_what_is_left(net, found, fits, file)
        return fits

    def _head_or_nothing(self, net: nn.Module) -> frozenset[str]:
        try:
            return self._head_of(net)
        except ConfigError:
            return frozenset()

    def _say_what_is_left(self, net: nn.Module, found: Weights, fits: Weights, file: str) -> None:
        drawn, own = _drawn(net, fits), net.state_dict()
        unused = [name for name in found if name not in own]
        if not drawn and not unused:
            return
        begin = f"; {_some(drawn)} {'begins' if len(drawn) == 1 else 'begin'} as drawn" if drawn else ""
        not_ours = f"; the network has no {_some(unused)}" if unused else ""
        total = len(tensors_of(net))
        warnings.warn(
            f"{self._where}: weights: {file}: {total - len(drawn)} of the network's {total} tensors are the file's"
            f"{begin}{not_ours}",
            PotluckWarning,
            stacklevel=2,
        )

    def _check_whole(self, net: nn.Module, file: str) -> None:
        """Check that nothing is frozen by `train_only` that the file lacks: it would stay as drawn for good.

        Of buffers that is BatchNorm's statistics; a builder may compute others, which files leave out.
        """
        names = {name for name, _ in net.named_parameters()}
        frozen = {name for name in frozen_names(net) if name in names or name.endswith(_STATISTICS)}
        if self._train_only and (random := [name for name in _drawn(net, self._loaded) if name in frozen]):
            raise ConfigError(
                f"{self._where}: weights: {file} lacks {_some(random)}, which train_only freezes, so that it would stay"
                " as drawn; expected a file that has it, or its module in train_only"
            )


def head_names(net: nn.Module, input_shape: InputShape, cut: tuple[str, ...] = ()) -> frozenset[str]:
    """Names of the parameters and buffers of a network's head, which is left as it is.

    Of a staged net that is its head, or the exit in which it ends; of any other what comes behind the features that its
    plan finds, or else the layer whose rows are its outputs.

    Args:
        net: a network.
        input_shape: of one example, or of each of the named inputs.
        cut: see `potluck.core.nets.splitting.make_plan`.

    Raises:
        ConfigError: it cannot be found, or the network cannot be cut there.
    """
    if isinstance(net, StagedNet):
        return _names_of_ending(net)
    probe = with_entrance(copy.deepcopy(net), input_shape)
    for real in (not embeds(net), embeds(net)):  # nets that embed positions read real numbers all the same
        Splits(input_shape, real).remember(probe, (HEAD,), cut)
        try:
            return split(probe).last_names()
        except CannotSplit:
            if cut and real is embeds(net):
                raise
    return classifier_of(probe, input_shape)


def file_digest(file: str) -> str:
    """The digest of a file of initial weights, read once in a process as long as size and time stay the same.

    Raises:
        ConfigError: it cannot be read, or this node's owner did not name it.
    """
    return _digest_at(*_stamp(file))


def tensors_in(file: str) -> Weights:
    """The tensors of a file by name, on the CPU; read once in a process as long as size and time stay the same.

    Raises:
        ConfigError: it cannot be read, holds something else, or this node's owner did not name it.
    """
    place, *rest = _stamp(file)
    found = _tensors_at(place, *rest)
    if isinstance(found, Mapping):
        odd = next((key for key, value in found.items() if not isinstance(value, Tensor)), None)
        if odd is None and found:
            return cast(Weights, dict(found))
        what = f"{odd!r} of type {type(found[odd]).__name__}" if odd is not None else "no tensor"
    else:
        what = f"something of type {type(found).__name__}"
    raise ConfigError(f"weights: {file}: found {what} in it; expected tensors by name: save net.state_dict()")


def _stamp(file: str) -> tuple[str, int, int]:
    """A file's path, size and time of the last change, of a file that may be opened."""
    place = entered(Path(file).expanduser().absolute())
    if place.suffix not in _SUFFIXES:
        raise ConfigError(f"weights: {file}: found the ending {place.suffix!r}; {_EXPECTED}")
    try:
        facts = place.stat()
    except OSError as error:
        raise ConfigError(f"weights: {file}: cannot be read: {error.strerror}; {_EXPECTED}") from error
    return str(place), facts.st_size, facts.st_mtime_ns


@lru_cache(maxsize=64)
def _digest_at(place: str, size: int, changed: int) -> str:
    try:
        return digest(Path(place).read_bytes())
    except OSError as error:
        raise ConfigError(f"weights: {place}: cannot be read: {error.strerror}; {_EXPECTED}") from error


@lru_cache(maxsize=4)  # builders hold what they need for as long as they live
def _tensors_at(place: str, size: int, changed: int) -> Any:
    """What a file holds; of torch's files only what is no code."""
    try:
        if place.endswith(".safetensors"):
            return load_file(place)
        return torch.load(place, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"weights: {place}: cannot be read: {error}; {_EXPECTED}") from error
    except Exception as error:  # torch raises errors of several kinds, one of them for files with code
        raise ConfigError(
            f"weights: {place}: cannot be read as tensors alone: {explained(error)[:120]}; {_EXPECTED}"
        ) from error


def _named_as(own: Mapping[str, Tensor], found: Weights) -> Weights:
    """A file's tensors under the net's names: without a prefix that all of them have, if none is the net's with it."""
    while found and not found.keys() & own.keys():
        prefix = next((one for one in _PREFIXES if all(name.startswith(one) for name in found)), None)
        if prefix is None:
            break
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def _drawn(net: nn.Module, loaded: Weights) -> list[str]:
    """The net's tensors that are loaded under none of their names."""
    own: Weights = net.state_dict(keep_vars=True)
    given = {id(own[name]) for name in loaded}
    return [name for name, tensor in tensors_of(net).items() if id(tensor) not in given]


def _leading(tensor: Tensor, own: Tensor) -> Tensor:
    """The leading slice of a full net's tensor that a narrower net's is."""
    return tensor if tensor.shape == own.shape else tensor[tuple(slice(side) for side in own.shape)]


def _names_of_ending(net: StagedNet) -> frozenset[str]:
    """Names of the tensors of a staged net's head, or of the exit in which it ends."""
    module = net.exits[net.ending] if net.ending else net.head
    last = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return frozenset(name for name, tensor in tensors_of(net).items() if id(tensor) in last)


def _hold(net: nn.Module, trained: Collection[int]) -> None:
    """Freeze all other tensors: parameters, and buffers by evaluation mode, as of BatchNorm's statistics."""
    for parameter in net.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)
    if not net.training:  # in a net that is in evaluation mode as a whole, no layer is held
        net.train()
    for module in net.modules():
        has_buffers = next(module.buffers(recurse=False), None) is not None
        if has_buffers and not any(id(tensor) in trained for tensor in (*module.parameters(), *module.buffers())):
            module.training = False


def _some(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(list(names)[:_SHOWN]) + more
