"""Who plays what, in which variants, and what to bear in mind about each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Environment = Literal["own", "peers", "older_jax"]

PLAYS = {
    "Potluck": ("mlp", "resnet", "cnn", "heterogeneous"),
    "Potluck before": ("mlp", "resnet", "cnn", "heterogeneous"),
    "plain PyTorch": ("mlp", "resnet", "cnn", "heterogeneous"),
    "Flower": ("mlp", "resnet", "cnn"),
    "pfl": ("mlp", "resnet", "cnn"),
    "FedLab": ("mlp", "resnet", "cnn"),
    "FedJAX": ("mlp", "cnn"),
}
"""By framework, its workloads."""

CAVEATS = {
    "all": "Targets are noise and nothing is evaluated: this is the time of a round, not the time to an accuracy. "
    "Inputs are float32 in memory, without augmentation.",
    "Potluck": "Every message is serialised to bytes and back, as its engine always does. It asks PyTorch for the "
    "fused Adam and gathers batches from a tensor; plain PyTorch, Flower and FedLab take the default Adam and a "
    "DataLoader, as tutorials have it, pfl the default Adam.",
    "Potluck before": "Another checkout, given by --before, with its own contestant.",
    "plain PyTorch": "On the heterogeneous workload it averages layer by layer over the clients that have the layer, "
    "as Potluck's FedAvg does.",
    "Flower": "Its simulation passes messages on every 0.1 s and looks for replies every 0.1 s: up to 0.2 s of waiting "
    "are part of a round. `run_simulation`, used here, is deprecated in favour of the command `flwr run`, which "
    "simulates with the same Ray backend. It draws the clients of a round itself.",
    "pfl": "Its in-memory user datasets are not shuffled, and it neither sends nor averages BatchNorm's running "
    "statistics: both save it work. It evaluates in its first iteration, which counts as start-up.",
    "FedLab": "Adam takes the place of the SGD of its serial trainer, in the method that is there to be replaced. It "
    "neither sends nor averages BatchNorm's running statistics, which saves it work. Clients in several linked "
    "processes, which it offers as well, are not tried.",
    "FedJAX": "Its last release, 0.0.17, is of 2023. On current versions of JAX it needs one function put back under "
    "an old name, and its pmap backend does not run; the variants with an older JAX have neither problem. It fills "
    "the last batch up: its clients see 208 examples and not 200. Its models have no BatchNorm state.",
}
"""By framework, where it is handicapped or helped."""


@dataclass(frozen=True)
class Entry:
    """A contestant in one variant.

    Attributes:
        framework: whose variants are compared among themselves, and the fastest with the others.
        variant: in words.
        module: of `contestants`.
        options: of the module.
        environment: which Python runs it.
        processes: that torchrun starts; 1 for none of it.
        apart: how the variant computes something else than the other contestants; it is not their rival then.
        checkout: of Potluck, whose contestants and sources are run; None for this one.
    """

    framework: str
    variant: str
    module: str
    options: tuple[str, ...] = ()
    environment: Environment = "peers"
    processes: int = 1
    apart: str | None = None
    checkout: Path | None = None

    @property
    def label(self) -> str:
        """Framework and variant."""
        return f"{self.framework}, {self.variant}"

    def command(self, python: str, workload: str, smoke: bool) -> list[str]:
        """What to run from this folder."""
        launcher = ["torch.distributed.run", "--nproc-per-node", str(self.processes), "-m"]
        start = [python, "-m", *(launcher if self.processes > 1 else []), f"contestants.{self.module}"]
        return [*start, "--workload", workload, *self.options, *(["--smoke"] if smoke else [])]


def base(workload: str, cores: int) -> Entry:
    """The variant that all others are compared with."""
    return _float32(cores, "channels_last" if _convolves(workload) else "contiguous")


def entries(workload: str, cores: int, before: Path | None = None) -> list[Entry]:
    """All variants that play a workload on so many cores, each once, by framework.

    Args:
        workload: its name.
        cores: of the variants with several processes or threads.
        before: another checkout of Potluck, which plays too.
    """
    ours = list(_potluck(workload, cores))
    earlier = [replace(entry, framework="Potluck before", checkout=before) for entry in ours if before]
    found = [*ours, *earlier, *_others(cores)]
    once = dict.fromkeys(entry for entry in found if workload in PLAYS[entry.framework])
    return sorted(once, key=lambda entry: list(PLAYS).index(entry.framework))


def _potluck(workload: str, cores: int) -> Iterator[Entry]:
    yield base(workload, cores)
    yield base(workload, 1)
    yield _float32(cores, "contiguous")
    processes = plural(cores, "process")
    if _convolves(workload):
        options = ("--workers", str(cores), "--precision", "bf16", "--layout", "channels_last")
        yield Entry(
            "Potluck", f"bf16, channels last, {processes}", "potluck", options, "own", apart="another precision"
        )
    if workload == "heterogeneous":
        options = ("--workers", str(cores), "--layout", "channels_last", "--method", "fedin")
        variant = f"FedIN, fp32, channels last, {processes}"
        yield Entry("Potluck", variant, "potluck", options, "own", apart="another method")


def _float32(cores: int, layout: str) -> Entry:
    words = ["fp32", *(["channels last"] if layout == "channels_last" else []), plural(cores, "process")]
    return Entry("Potluck", ", ".join(words), "potluck", ("--workers", str(cores), "--layout", layout), "own")


def _convolves(workload: str) -> bool:
    return workload != "mlp"


def _others(cores: int) -> Iterator[Entry]:
    for threads in (1, cores):
        variant, options = plural(threads, "thread"), ("--threads", str(threads))
        yield Entry("plain PyTorch", variant, "plain", options, "own")
        yield Entry("pfl", variant, "pfl", options)
        yield Entry("FedLab", variant, "fedlab", options)
        yield Entry("FedJAX", variant, "fedjax", options)
        yield Entry("FedJAX", f"older JAX, {variant}", "fedjax", options, "older_jax")
    yield Entry("Flower", plural(cores, "actor"), "flower", ("--workers", str(cores)))
    if cores > 1:
        yield Entry("pfl", plural(cores, "process"), "pfl", processes=cores)
        options = ("--threads", str(cores), "--backend", "pmap")
        yield Entry("FedJAX", f"older JAX, pmap over {cores} devices", "fedjax", options, "older_jax")


def plural(number: int, word: str) -> str:
    """The number and the word."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith('s') else 's'}"
