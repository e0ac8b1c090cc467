"""Potluck and HtFLlib side by side: the same arrays, networks, initial weights and schedule.

    python benchmarks/htfllib.py CHECKOUT [--methods FedProto FML] [--repeats 3] [--rounds 20]

CHECKOUT is a copy of https://github.com/TsingZ0/HtFLlib, which is read and not changed. Each repeat has a division of
MNIST-1D and initial weights of its own; its runs take turns, each in a process of its own with one thread. Clients hold
a multiple of the batch size, since HtFLlib leaves out incomplete batches, and train by plain SGD, its one optimiser.
Prints a table: accuracy over all clients' own test parts after the last round, seconds of a round without
evaluation, processor seconds of a round with all that belongs to it, memory above what the imports take, and bytes
written to files.

What HtFLlib does not find here is put in its place in the process that runs it: empty modules for torchvision and h5py,
`torch.load` that accepts whole networks, and no file of results at the end.
"""

import argparse
import io
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from potluck import Examples, Federation, Run, RunConfig, Site, fl, get_method
from potluck.core.ground.rng import fold_in, isolated
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.resolve import resolve
from potluck.models import get_model
from potluck.models.contract import StagedNet
from potluck.records import TIMINGS

FEATURES, CLASSES, LENGTH = 32, 10, 40
FAMILIES = ("logistic", "mlp", "cnn")
SERVER_FAMILY = "mlp"  # of FML's common network
NAME = "mnist1d"
Result = dict[str, float]


@dataclass(frozen=True)
class Schedule:
    """How long both train."""

    clients: int = 9
    rounds: int = 20
    epochs: int = 1
    batch_size: int = 10
    lr: float = 0.05
    server_epochs: int = 20

    @property
    def training(self) -> fl.LocalTraining:
        """As Potluck has it."""
        return fl.LocalTraining("sgd", lr=self.lr, epochs=self.epochs, batch_size=self.batch_size)


@dataclass(frozen=True)
class Contest:
    """A method in both.

    Attributes:
        ours: its name here, and its hyper-parameters where they are not the defaults.
        server: HtFLlib's module and class.
        theirs: its settings there.
    """

    ours: tuple[str, Mapping[str, Any]]
    server: tuple[str, str]
    theirs: Mapping[str, Any]


CONTESTS = {
    "FedProto": Contest(("fedproto", {"strength": 1.0}), ("serverproto", "FedProto"), {"lamda": 1.0}),
    "FML": Contest(("fml", {}), ("serverfml", "FML"), {"alpha": 0.5, "beta": 0.5}),
    "FD": Contest(("fd", {"exchanged": "logits", "averaged": "all"}), ("serverfd", "FD"), {"lamda": 1.0}),
    "LG-FedAvg": Contest(("lgfedavg", {}), ("serverlg", "LG_FedAvg"), {}),
    "FedTGP": Contest(("fedtgp", {"strength": 10.0}), ("servertgp", "FedTGP"), {"lamda": 10.0}),
}


# The ground


def prepare(ground: Path, seed: int, schedule: Schedule) -> None:
    """Write every client's arrays, in HtFLlib's layout, and every family's initial weights."""
    federation = {"dataset": NAME, "clients": schedule.clients, "validation_fraction": 0.0, "models": ["mlp2"]}
    partition = {"name": "dirichlet", "alpha": 0.3}
    tree = {"federation": {**federation, "partition": partition}, "method": {"name": "local"}, "run": {"seed": seed}}
    for id, site in assemble(resolve(tree, "htfllib.py")).federation.sites.items():
        train, _, _ = site.train.batch(torch.arange(len(site.train)))
        whole = len(train) // schedule.batch_size * schedule.batch_size
        kept = torch.randperm(len(train), generator=fold_in(seed, "kept", id).generator())[:whole]
        for part, examples, rows in (("train", site.train, kept), ("test", site.test, torch.arange(len(site.test)))):
            inputs, targets, _ = examples.batch(rows)
            place = ground / "dataset" / NAME / part / f"{id}.npz"
            place.parent.mkdir(parents=True, exist_ok=True)
            np.savez(place, data=np.array({"x": inputs.numpy(), "y": targets.numpy()}, dtype=object))
    for family in FAMILIES:
        with isolated(fold_in(seed, "initial", family)):
            torch.save(network(family).state_dict(), ground / f"{family}.pt")


def arrays(ground: Path, part: str, id: int) -> tuple[Tensor, Tensor]:
    """One client's inputs and targets."""
    # The pickle inside was written by `prepare`.
    held = np.load(ground / "dataset" / NAME / part / f"{id}.npz", allow_pickle=True)["data"].tolist()
    return torch.as_tensor(held["x"]), torch.as_tensor(held["y"])


def network(family: str, weights: Path | None = None) -> StagedNet:
    """A network of a family, with stored weights if they are given."""
    net = get_model(f"mnist1d_{family}")(CLASSES, (LENGTH,), features=FEATURES)
    if weights is not None:
        net.load_state_dict(torch.load(weights, weights_only=True))
    return net


class Split(nn.Module):
    """A network in HtFLlib's form: a base and a head."""

    def __init__(self, net: StagedNet) -> None:
        super().__init__()
        self.base, self.head = nn.Sequential(net.stages, net.pool), net.head

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.base(x))


# The two sides


def play_potluck(ground: Path, contest: Contest, schedule: Schedule, seed: int) -> Result:
    """One run of Potluck, with records and checkpoints."""
    parts = {part: [arrays(ground, part, id) for id in range(schedule.clients)] for part in ("train", "test")}
    sites = {
        id: Site(
            id,
            FAMILIES[id % len(FAMILIES)],
            train=Examples(*parts["train"][id]),
            validation=Examples(*(tensor[:0] for tensor in parts["train"][id])),
            test=Examples(*parts["test"][id]),
        )
        for id in range(schedule.clients)
    }
    everything = Examples(*(torch.cat(tensors) for tensors in zip(*parts["test"], strict=True)))
    builders = {family: partial(network, family, ground / f"{family}.pt") for family in FAMILIES}
    federation = Federation(sites, builders, SERVER_FAMILY, num_classes=CLASSES, test=everything)
    name, options = contest.ours
    if name == "fedtgp":
        server = fl.LocalTraining("sgd", lr=schedule.lr, epochs=schedule.server_epochs, batch_size=schedule.batch_size)
        options = {**options, "server_training": server}
    method = get_method(name)(training=schedule.training, **options)
    rounds = schedule.rounds
    config = RunConfig(rounds, seed=seed, evaluate_every=rounds, common_test=False, executor="sequential")
    folder = ground / f"run-{name}"
    with measured(rounds) as found:
        result = Run(method, federation, config, folder).run()
    lines = [json.loads(line) for line in (folder / TIMINGS).read_text().splitlines()]
    found["seconds"] = median(line["seconds_total"] for line in lines[1:-1])
    found["accuracy"] = result.rounds[-1].value("pooled", "accuracy")
    return found


def play_htfllib(ground: Path, checkout: Path, contest: Contest, schedule: Schedule, seed: int) -> Result:
    """One run of HtFLlib, in its own folder structure under `ground`."""
    sys.path.insert(0, str(checkout / "system"))
    sys.modules.update({name: ModuleType(name) for name in ("torchvision", "h5py")})
    load = torch.load
    torch.load = lambda *arguments, **options: load(*arguments, **{"weights_only": False, **options})
    module, name = contest.server
    base = import_module("flcore.servers.serverbase")
    base.Server.save_results = lambda self: None
    servers = import_module(f"flcore.servers.{module}")
    if name == "FML":
        servers.BaseHeadSplit = lambda *_, **__: Split(network(SERVER_FAMILY, ground / f"{SERVER_FAMILY}.pt"))
    for id in range(schedule.clients):
        family = FAMILIES[id % len(FAMILIES)]
        models = ground / "models"
        models.mkdir(exist_ok=True)
        torch.save(Split(network(family, ground / f"{family}.pt")), models / f"Client_{id}_model.pt")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    with measured(schedule.rounds + 1) as found:  # it evaluates before a round, so it trains one round more
        server = getattr(servers, name)(settings(ground, schedule, name, contest.theirs), 0)
        server.train()
    found["seconds"] = median(server.Budget[1:-1])
    found["accuracy"] = server.rs_test_acc[-1]
    return found


def settings(ground: Path, schedule: Schedule, name: str, own: Mapping[str, Any]) -> SimpleNamespace:
    """The arguments of HtFLlib's command line; every client takes part in every round."""
    usual = {"device": "cpu", "dataset": NAME, "num_classes": CLASSES, "algorithm": name, "goal": "", "few_shot": 0}
    usual |= {"join_ratio": 1.0, "random_join_ratio": False, "time_select": False, "time_threthold": 1e4}
    usual |= {"client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "top_cnt": 100}
    usual |= {"auto_break": False, "save_folder_name": "temp", "models_folder_name": str(ground / "models")}
    usual |= {"num_clients": schedule.clients, "global_rounds": schedule.rounds, "eval_gap": schedule.rounds}
    usual |= {"local_epochs": schedule.epochs, "batch_size": schedule.batch_size, "feature_dim": FEATURES}
    usual |= {"local_learning_rate": schedule.lr, "server_epochs": schedule.server_epochs, "margin_threthold": 100.0}
    return SimpleNamespace(**usual, **own)


@contextmanager
def measured(rounds: int) -> Iterator[Result]:
    """Processor seconds a round, growth of memory in MiB, and megabytes written to files."""
    found: Result = {}
    memory, written, begun = peak(), bytes_written(), time.process_time()
    with redirect_stdout(io.StringIO()):
        yield found
    found["processor"] = (time.process_time() - begun) / rounds
    found["memory"] = peak() - memory
    found["written"] = (bytes_written() - written) / 1e6


def peak() -> float:
    """The most memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bytes_written() -> int:
    """Bytes that this process has handed to the system to write."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


# The table


def run_all(options: argparse.Namespace, schedule: Schedule) -> dict[tuple[str, str], list[Result]]:
    """Play every method of both, taking turns."""
    found: dict[tuple[str, str], list[Result]] = {}
    for seed in range(options.repeats):
        for method in options.methods:
            for side in ("potluck", "htfllib") if seed % 2 == 0 else ("htfllib", "potluck"):
                with TemporaryDirectory() as place:
                    result = in_process(options.checkout.resolve(), side, method, seed, Path(place), schedule)
                if result is None:
                    continue
                found.setdefault((method, side), []).append(result)
                print(f"{method}, {side}, repeat {seed}: {json.dumps(result)}", file=sys.stderr, flush=True)
    return found


def in_process(checkout: Path, side: str, method: str, seed: int, place: Path, schedule: Schedule) -> Result | None:
    """One run in a process of its own, in a folder beside its data; None, and the reason printed, if it fails."""
    prepare(place, seed, schedule)
    work = place / "system"
    work.mkdir()
    play = json.dumps({"side": side, "method": method, "seed": seed, "schedule": asdict(schedule)})
    command = [sys.executable, str(Path(__file__).resolve()), str(checkout), "--play", play]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{method}, {side}, repeat {seed} failed: {done.stderr.strip()[-300:]}", file=sys.stderr, flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def play(checkout: Path, text: str) -> None:
    """One run in this process; its result as the last line printed."""
    asked = json.loads(text)
    schedule, contest, seed = Schedule(**asked["schedule"]), CONTESTS[asked["method"]], asked["seed"]
    torch.set_num_threads(1)
    ground = Path.cwd().parent
    if asked["side"] == "potluck":
        print(json.dumps(play_potluck(ground, contest, schedule, seed)))
    else:
        print(json.dumps(play_htfllib(ground, checkout, contest, schedule, seed)))


def table(found: Mapping[tuple[str, str], list[Result]]) -> str:
    """The results as Markdown: accuracies with their standard deviation over repeats, and medians."""
    lines = [
        "| method | | accuracy | s/round | processor s/round | MiB | MB written |",
        "|---|---|---|---|---|---|---|",
    ]
    for (method, side), results in found.items():
        shares = [100 * result["accuracy"] for result in results]
        accuracy = f"{fmean(shares):.1f}" + (f" ± {stdev(shares):.1f}" if len(shares) > 1 else "")
        seconds, processor, memory, written = (
            median(result[what] for result in results) for what in ("seconds", "processor", "memory", "written")
        )
        name = {"potluck": "Potluck", "htfllib": "HtFLlib"}[side]
        lines.append(
            f"| {method} | {name} | {accuracy} | {seconds:.3f} | {processor:.3f} | {memory:.0f} | {written:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Play and print, or carry out one run of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of HtFLlib, which has a folder `system`")
    parser.add_argument("--methods", nargs="+", choices=CONTESTS, default=list(CONTESTS), help="all by default")
    parser.add_argument("--repeats", type=int, default=3, help="divisions of the data")
    parser.add_argument("--rounds", type=int, default=Schedule.rounds, help="at least 3")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.checkout / "system" / "flcore").is_dir():
        parser.error(f"{options.checkout}: no folder system/flcore; expected a copy of github.com/TsingZ0/HtFLlib")
    if options.play:
        play(options.checkout, options.play)
        return
    print(table(run_all(options, Schedule(rounds=options.rounds))))


if __name__ == "__main__":
    main()
