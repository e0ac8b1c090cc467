"""`potluck export`: a trained network out of a run's folder, as a file that works without the run."""

from pathlib import Path

import typer

from potluck.api.export import PROVENANCE, Exported, format_of
from potluck.api.result import RunResult, open_run
from potluck.core.ground.errors import ConfigError
from potluck.records import TITLES, TITLES_OF_A_CLIENT

_READ = {
    ".safetensors": "net.load_state_dict(safetensors.torch.load_file({name!r}))",
    "state-dict": "net.load_state_dict(torch.load({name!r}, weights_only=True)); net.eval()",
    "exported": "torch.export.load({name!r}).module()",
    "torchscript": "torch.jit.load({name!r})",
    "onnx": "onnxruntime.InferenceSession({name!r})",
}


def write_network(run: Path, to: Path, *, client: int | None, server: bool, format: str | None, chosen: bool) -> None:
    """Write the network that a client, or the server, predicts with, and say how to read it.

    Raises:
        ConfigError: neither or both are asked for, or the format cannot hold the network.
    """
    if (client is None) != server:
        raise ConfigError("export: give --client and its number, or --global for the global model; one of them")
    format_of(to, format)
    result = open_run(run)
    written = result.export("global" if client is None else client, to, format=format, chosen=chosen)
    facts = written.facts
    score = _score(result, client, facts["round"])
    typer.echo(f"Wrote {to}: {_named(written)}, after round {facts['round']}{score}")
    shape = ", ".join(map(str, facts["input"]["shape"]))
    prepared = "as stored" if not facts["preprocessing"] else f"prepared as {_place(written)} says"
    typer.echo(f"It reads {facts['input']['type']} inputs (batch, {shape}), {prepared}.")
    read = _READ[to.suffix if to.suffix == ".safetensors" else written.format]
    typer.echo(f"Read it with: {read.format(name=str(to))}")


def _named(written: Exported) -> str:
    facts = written.facts
    who = "the global model" if facts["client"] == "global" else f"client {facts['client']}"
    return f"{written.format} of {who}, {facts['architecture']}"


def _place(written: Exported) -> str:
    """Where the provenance is."""
    if written.format == "state-dict" and written.path.suffix != ".safetensors":
        return f"{written.path}.json"
    return "its metadata" if written.path.suffix in (".safetensors", ".onnx") else f"its {PROVENANCE}"


def _score(result: RunResult, client: int | None, number: int) -> str:
    """How the network did on held-out examples; empty if it was not evaluated."""
    metric = result.metric
    if client is None:
        value, where = result.rounds[number - 1].value("global", metric.name), f"the {TITLES['common']}"
    else:
        score = next((one for one in result.scores if (one.round, one.client) == (number, client)), None)
        value, where = score.value("personal", metric.name) if score else None, f"its {TITLES_OF_A_CLIENT['personal']}"
    return "" if value is None else f", {metric.label} {metric.text(value)} on {where}"
