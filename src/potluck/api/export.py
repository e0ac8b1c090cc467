"""A trained network as a file that works without the run: its weights, or a program that predicts as the client.

What is written is the network that a client predicts with, see `potluck.experiment.folder.trained.Trained.model`.
Every file is read again before it gets its name, and its outputs compared with the network's, so a file that is there
is right.
"""

import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from potluck._version import __version__
from potluck.core.federation import ClientId, Federation
from potluck.core.ground.errors import ConfigError, StorageError, explained
from potluck.core.ground.inputs import Inputs, rows_of
from potluck.core.ground.rng import Key
from potluck.core.nets.classes import alone, own_classes_of
from potluck.core.nets.scale import Scale, cut_marked
from potluck.core.requests.examples import Examples
from potluck.experiment.folder.trained import Trained

Format = Literal["state-dict", "exported", "torchscript", "onnx"]
"""The weights by name; or the network as a program, of `torch.export`, of TorchScript, or of ONNX."""

SUFFIXES: Mapping[str, Format] = {
    ".pt": "state-dict",
    ".pth": "state-dict",
    ".safetensors": "state-dict",
    ".pt2": "exported",
    ".ts": "torchscript",
    ".onnx": "onnx",
}
"""The format of a file whose name ends so, unless another is asked for."""

PROVENANCE = "potluck.json"
"""The name of the facts about a file inside it; beside a file that has no room for them, they are in FILE.json."""

_TRIED = 32  # examples on which a file is compared with the network


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Attributes:
        path: of the file.
        format: its format.
        facts: its provenance: run, round, client, architecture and where its table says that it is cut, classes, inputs
            and how they are prepared.
    """

    path: Path
    format: Format
    facts: Mapping[str, Any]


def format_of(path: Path, chosen: str | None = None) -> Format:
    """The format to write a file in: the chosen one, or that of its name.

    Raises:
        ConfigError: there is none of this name, or the file's name says none.
    """
    formats = get_args(Format)
    if chosen is not None and chosen not in formats:
        raise ConfigError(f"format {chosen!r}: expected one of {', '.join(formats)}")
    found = chosen or SUFFIXES.get(path.suffix)
    if found is None:
        endings = ", ".join(f"{suffix} ({format})" for suffix, format in SUFFIXES.items())
        raise ConfigError(f"{path}: its name says no format; expected one that ends in {endings}, or a format")
    return cast(Format, found)


def export(
    trained: Trained,
    client: ClientId | None,
    path: Path,
    chosen: str | None = None,
    run: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the network that a client predicts with, or with None the server's.

    Args:
        trained: the models.
        client: whose.
        path: of the file; its folder is made.
        chosen: the format; by default that of the file's name.
        run: facts about the run for the file's provenance.

    Raises:
        ConfigError: there is no such client or format, or the format cannot hold this network; says why.
        StorageError: the file cannot be written.
    """
    format = format_of(path, chosen)
    net = trained.global_model() if client is None else trained.model(client)
    examples, own = trained.examples(client), own_classes_of(net)
    who = "the global model" if client is None else f"client {client}"
    facts = {**(run or {}), **_facts(trained, client, net, examples)}
    if own is not None:
        facts |= {"outputs": len(own.numbers), "classes": [facts["classes"][number] for number in own.numbers]}
        net = alone(net)
    writing = _Writing(net, _inputs(examples), facts, who)
    if format == "state-dict":
        facts["scale"] = asdict(writing.scale_in(trained.federation, client))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as aside:
            place = Path(aside) / path.name
            getattr(writing, f"as_{format.replace('-', '_')}")(place)
            for written in Path(aside).iterdir():
                os.replace(written, path.parent / written.name)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    return Exported(path, format, facts)


def _inputs(examples: Examples) -> Inputs:
    """A few prepared inputs; at least three, while a program is traced on two."""
    count = min(len(examples), _TRIED)
    return examples.batch(torch.arange(max(count, 3)) % count).inputs


def _facts(trained: Trained, client: ClientId | None, net: nn.Module, examples: Examples) -> dict[str, Any]:
    federation = trained.federation
    architecture = federation.server_architecture if client is None else federation.sites[client].architecture
    inputs = examples.batch(torch.arange(1)).inputs
    return {
        "potluck": __version__,
        "round": trained.round,
        "client": "global" if client is None else client,
        "architecture": architecture,
        "cut": _cut(federation, architecture),
        "network": type(net).__name__,
        "task": federation.task.name,
        "outputs": federation.num_classes,
        "classes": list(trained.classes),
        "input": _form(inputs),
        "preprocessing": preparation_of(examples),
    }


def _cut(federation: Federation, architecture: str) -> list[str]:
    """Where the model's table says that its networks are cut; empty if it does not."""
    return list(cut_marked(federation.architectures[federation.base_of(architecture)]))


def _form(inputs: Inputs) -> dict[str, Any]:
    """Shape and type of one input, or of each by name."""
    if isinstance(inputs, Mapping):
        return {name: _form(tensor) for name, tensor in inputs.items()}
    return {"shape": list(inputs.shape[1:]), "type": str(inputs.dtype).removeprefix("torch.")}


def preparation_of(examples: Examples) -> list[Any]:
    """The fixed steps that make stored inputs the network's, in order: tables of their settings, or their text."""
    if examples.preprocess is None:
        return []
    steps: Any = getattr(examples.preprocess, "prepare", (examples.preprocess,))
    return [
        {"step": type(step).__name__, **asdict(step)}
        if is_dataclass(step) and not isinstance(step, type)
        else str(step)
        for step in steps
    ]


@dataclass(frozen=True)
class _Writing:
    """One network on its way into a file.

    Attributes:
        inputs: prepared, for the comparison.
        who: predicts with it; opens messages.
    """

    net: nn.Module
    inputs: Inputs
    facts: dict[str, Any]
    who: str

    def as_state_dict(self, place: Path) -> None:
        """Tensors by name: a safetensors file, or one of torch with the facts beside it."""
        weights = {name: tensor.detach().clone().contiguous() for name, tensor in self.net.state_dict().items()}
        if place.suffix == ".safetensors":
            from safetensors.torch import load_file, save_file

            save_file(weights, place, {PROVENANCE: json.dumps(self.facts)})
            found = load_file(place)
        else:
            torch.save(weights, place)
            place.with_name(f"{place.name}.json").write_text(json.dumps(self.facts, indent=1), encoding="utf-8")
            found = cast(dict[str, Tensor], torch.load(place, weights_only=True))
        if found.keys() != weights.keys() or not all(torch.equal(found[name], weights[name]) for name in weights):
            raise StorageError(f"{place.name}: reading it gives other weights than were written; is the disk sound?")

    def as_exported(self, place: Path) -> None:
        """A program of `torch.export`, with any number of inputs at once."""
        torch.export.save(self._program(), place, extra_files={PROVENANCE: json.dumps(self.facts)})
        program = torch.export.load(place).module()
        self._compare(program, "the exported program")

    def as_torchscript(self, place: Path) -> None:
        """A program of TorchScript, which programs in C++ read too."""
        with _quiet():
            try:
                traced = torch.jit.trace(self.net, (rows_of(self.inputs, slice(2)),), check_trace=False)
            except Exception as error:
                raise self._refusal("torchscript", error) from error
            torch.jit.save(traced, place, _extra_files={PROVENANCE: json.dumps(self.facts)})
            self._compare(torch.jit.load(place), "the traced program")

    def as_onnx(self, place: Path) -> None:
        """A program of ONNX, with the input `input`, or the inputs by their names, and the output `output`.

        Raises:
            ConfigError: a package is missing, or an operator of the network does not exist in ONNX.
        """
        try:
            import onnxruntime
            import onnxscript as onnxscript  # torch's exporter needs it
        except ImportError as error:
            raise ConfigError(f"onnx: {error.name} is not installed; pip install 'potluck[onnx]'") from error
        program = self._program()
        with _quiet(), _without_monitor():
            try:
                made: Any = torch.onnx.export(
                    program, dynamo=True, verbose=False, input_names=list(self._named), output_names=["output"]
                )
            except Exception as error:
                raise self._refusal("onnx", error) from error
            proto = made.model_proto
            for name, value in self.facts.items():
                entry = proto.metadata_props.add()
                entry.key, entry.value = name, value if isinstance(value, str) else json.dumps(value)
            place.write_bytes(proto.SerializeToString())
            session = onnxruntime.InferenceSession(place)
            given = {name: tensor.numpy() for name, tensor in self._named.items()}
            self._compare(lambda inputs: torch.from_numpy(session.run(None, given)[0]), "the ONNX program")

    @property
    def _named(self) -> Mapping[str, Tensor]:
        """The inputs by name; one alone is called `input`."""
        return self.inputs if isinstance(self.inputs, Mapping) else {"input": self.inputs}

    def scale_in(self, federation: Federation, client: ClientId | None) -> Scale:
        """At which scale the architecture, with these weights, predicts as this network does.

        Raises:
            ConfigError: at none: the network is more than the weights of an architecture.
        """
        weights, expected = self.net.state_dict(), self._outputs(self.net)
        own = self.facts["architecture"]
        capacity = 1.0 if client is None else federation.sites[client].capacity
        for name in dict.fromkeys((own, federation.server_architecture)):
            for width in _widths(federation, name, capacity, weights):
                other = _loaded(federation, name, Scale(width), weights)
                if other is not None and torch.equal(self._outputs(other), expected):
                    self.facts.update(architecture=name, cut=_cut(federation, name))
                    return Scale(width)
        raise ConfigError(
            f"{self.who} predicts with {self._described()}, whose weights alone do not say how; write it as a program:"
            " a file that ends in .pt2, .ts or .onnx"
        )

    def _described(self) -> str:
        return f"{type(self.net).__name__}, which is not {self.facts['architecture']} as it is built"

    def _outputs(self, net: Callable[[Any], Tensor]) -> Tensor:
        with torch.no_grad():
            return net(self.inputs)

    def _program(self) -> torch.export.ExportedProgram:
        """The network as a graph, for any number of inputs.

        Raises:
            ConfigError: it cannot be made one.
        """
        self._outputs(self.net)  # what is made at the first call, as the plan of a net that is cut, is not traced
        with _quiet(), _unwinding(), torch.no_grad():
            try:
                batch = torch.export.Dim("batch", min=1)
                growing = {name: {0: batch} for name in self._named}
                shapes = growing if isinstance(self.inputs, Mapping) else growing["input"]
                net = _OfMapping(self.net) if isinstance(self.inputs, Mapping) else self.net
                return torch.export.export(net, (rows_of(self.inputs, slice(2)),), dynamic_shapes=(shapes,))
            except Exception as error:
                raise self._refusal("exported", error) from error

    def _compare(self, program: Callable[[Any], Tensor], what: str) -> None:
        expected = self._outputs(self.net)
        try:
            found = self._outputs(program)
            if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
                return
            problem = "gives other outputs"
        except Exception:  # of the program, which knows no lines of the user's code
            problem = "fails"
        raise ConfigError(
            f"{self.who}: {what} of {type(self.net).__name__} {problem} on other inputs than it was traced on, since"
            f" its forward {_FIXED}"
        )

    def _refusal(self, format: Format, error: Exception) -> ConfigError:
        text = _cause(error)
        return ConfigError(f"{self.who}: {type(self.net).__name__} cannot be written as {format}: {text}")


class _OfMapping(nn.Module):
    """A network as a function of a mapping, which torch binds to the names of `forward` before any hook is called."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Inputs by name to logits (batch, classes)."""
        return self.net(inputs)


def _widths(federation: Federation, name: str, capacity: float, weights: Mapping[str, Tensor]) -> list[float]:
    """The widths that an architecture with tensors of these shapes may have; none if it has other tensors."""
    full = federation.build(name, Key(("exported", name))).state_dict()
    if full.keys() != weights.keys():
        return []
    sizes = {pair for key, tensor in full.items() for pair in zip(weights[key].shape, tensor.shape, strict=False)}
    shares = sorted({small / large for small, large in sizes if 0 < small < large})
    return list(dict.fromkeys([capacity, *shares] if shares else [1.0]))


def _loaded(federation: Federation, name: str, scale: Scale, weights: Mapping[str, Tensor]) -> nn.Module | None:
    """The architecture at this scale with these weights; None if they are not its own."""
    try:
        net = federation.build(name, Key(("exported", name)), scale)
        net.load_state_dict(weights)
    except (RuntimeError, ConfigError, TypeError, ValueError):
        return None
    return alone(net.eval())


_FIXED = "works with sizes or values as Python numbers; write x.shape[0] for len(x), and torch.where for if"


def _cause(error: BaseException) -> str:
    """The first error behind others, in one line: the operator that is missing, or the place in the user's code."""
    while error.__cause__ is not None:
        error = error.__cause__
    if "Constraints violated" in str(error) or "data-dependent" in str(error):
        return f"its forward {_FIXED}"
    missing = re.search(r"OpOverload\(op='([\w.:]+)'", str(error))
    if missing:
        return f"its operator {missing[1]} does not exist there"
    where = re.search(r'File "([^"]+)", line (\d+)', str(error))
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    shown = explained(type(error)(first)) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {first}"
    return f"{shown[:300]}; {where[1]}, line {where[2]}" if where else shown[:300]


@contextmanager
def _quiet() -> Generator[None]:
    """Without torch's own remarks on tracing, of which none concerns the file: it is compared with the network."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _unwinding() -> Generator[None]:
    """Inside the block torch's tracer forgets a module whose call ended in an exception, as calls do at a place."""
    tracer: Any = torch.fx.Tracer
    whole = tracer.call_module

    def call_module(self: Any, *args: Any) -> Any:
        entered = len(self.module_stack)
        try:
            return whole(self, *args)
        except Exception:
            while len(self.module_stack) > entered:
                self.module_stack.popitem(last=True)
            raise

    tracer.call_module = call_module
    try:
        yield
    finally:
        tracer.call_module = whole


@contextmanager
def _without_monitor() -> Generator[None]:
    """Inside the block tqdm, which torch's exporter uses, starts no thread: beside one, later runs fork no workers."""
    from tqdm import tqdm

    progress: Any = tqdm
    interval, progress.monitor_interval = progress.monitor_interval, 0
    try:
        yield
    finally:
        progress.monitor_interval = interval
