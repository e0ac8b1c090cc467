"""What the twin foresees of a deployment, beside the deployment: four throttled nodes, four methods.

    sudo python benchmarks/twin_nodes.py [--rounds 20] [--repeats 3] [--methods fedavg fedin] [--out FILE]

Each node, with all of its programs, has a share of a core by Linux's quota for control groups, and a link with a
bandwidth and a latency (`benchmarks/nodes/throttled.py`); the server has neither. What is measured of devices before
each deployment, since a machine may not be as fast an hour later:

- `latency_s`: what an exchange takes a node in which nothing is computed (`benchmarks/nodes/empty.py`): the node alone
  at work, with as many bytes as in the method's rounds, without the time that these take on the link, and as much more
  as all nodes together take longer than the slowest;
- their speed with the method, in a round's first exchange and in later ones: from a trial of six rounds, of the last
  four of which a node's audit log has the seconds of what it computed, and `costs.jsonl` the operations; beside it
  from the very last one alone;
- bandwidths are what the links were given.

From this the twin foresees each method's rounds and bytes, as `potluck twin FEDERATION --devices DEVICES` does. Then
the rounds are carried out on the nodes, which join once: server and gate are what `potluck serve` starts. A round is
from its beginning to the server's next state; the only evaluation, at the end, is left out. Before and after each
deployment all devices are kept busy for a moment, which shows whether they can have their quotas: on a machine that has
other work they cannot, and then the comparison means little. Methods take turns. Needs the extra `flower`, and Linux.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from nodes.throttled import Device, Quota, link
from speed.machine import describe

from potluck.experiment.federation.suitability import federation_of
from potluck.experiment.running.foresee import foresee
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.flower.deploy.gate import Gate
from potluck.flower.deploy.keys import add_node, certify
from potluck.flower.deploy.processes import free_port, stop
from potluck.flower.deploy.superlink import SuperLink
from potluck.flower.server.hosting import run_app, write_app
from potluck.records import COSTS, ROUNDS, TIMINGS
from potluck.twin.devices import Fleet, TwinDevice
from potluck.twin.simulate import Load, simulate

HERE = Path(__file__).parent
EMPTY = HERE / "nodes" / "empty.py"
DEVICES = (
    Device("a", 0.35, 40.0, 20.0, 0.01),
    Device("b", 0.3, 20.0, 10.0, 0.02),
    Device("c", 0.3, 20.0, 10.0, 0.02),
    Device("d", 0.25, 10.0, 5.0, 0.03),
)
DEPTHS = [{"name": name, "width": 64} for name in ("cnn5", "cnn4", "cnn3", "cnn2")]
METHODS: Mapping[str, dict[str, Any]] = {
    "fedavg": {"models": DEPTHS[2:3]},
    "fedin": {"models": DEPTHS},
    "fedproto": {"models": DEPTHS},
    "heterofl": {"models": DEPTHS[1:2], "capacities": [1.0, 1.0, 0.5, 0.5]},
}
_SPIN = """
import time
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + 3:
    pass
print((time.process_time() - used) / 3)
"""
TRIAL, FIRST = 6, 2
"""Rounds by which devices' speeds are measured, and how many of them are left out, since nodes have more to do then."""
SETTLED = 10.0
"""Seconds of pause after a run, for its programs to end."""


def experiment_of(method: str, rounds: int) -> Experiment:
    """A method's federation, of as many clients as there are devices."""
    federation = {"dataset": "digits", "clients": len(DEVICES), "partition": {"name": "iid"}, **METHODS[method]}
    run = {"rounds": rounds, "evaluate_every": rounds, "common_test": False, "executor": "sequential"}
    return resolve({"federation": federation, "method": {"name": method, "training": {"epochs": 3}}, "run": run})


def granted(quotas: Sequence[Quota]) -> list[float]:
    """Of its quota, the share that each device gets at this moment, all of them at work; less than 1 if others are."""
    asked = [subprocess.Popen(quota.words([sys.executable, "-c", _SPIN]), stdout=subprocess.PIPE) for quota in quotas]
    return [float(one.communicate()[0]) / of.cores for one, of in zip(asked, DEVICES, strict=True)]


@contextmanager
def deployed(place: Path, quotas: Sequence[Quota]) -> Generator[SuperLink]:
    """What `potluck serve` keeps for its nodes, and throttled nodes that have joined."""
    keys, port = place / "keys", free_port()
    certify(keys, [], days=1)
    for device in DEVICES:
        add_node(keys, device.name)
    with ExitStack() as ends, SuperLink(place / "link", keys) as served:
        ends.enter_context(Gate(("127.0.0.1", port), served.address, keys, print, served.trust))
        served.register()
        for device, quota in zip(DEVICES, quotas, strict=True):
            way = link(device, at := free_port(), port)
            ends.callback(way.kill)
            words = ["join", f"127.0.0.1:{at}", "--keys", f"{keys}/nodes/{device.name}", "--allow-code", str(EMPTY)]
            (place / device.name).mkdir(mode=0o700)
            command = [sys.executable, "-m", "potluck", *words, "--state", str(place / device.name)]
            with (place / f"{device.name}.log").open("wb") as log:
                node = subprocess.Popen(quota.words(command), stdout=log, stderr=log, start_new_session=True)
            ends.callback(stop, node)
        yield served


def carried_out(link: SuperLink, place: Path, experiment: Experiment) -> Path:
    """The folder of a run on the nodes."""
    place.mkdir()
    for _ in run_app(link, write_app(place.with_name(f"app-{place.name}"), experiment, place), place, print):
        pass
    time.sleep(SETTLED)
    return place


def lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def loads_of(experiment: Experiment) -> list[Load]:
    """What each round asks of each client: operations and bytes."""
    federation = federation_of(experiment)
    return list(islice(foresee(experiment, federation).loads(experiment, lambda _: ()), experiment.run.rounds))


def latencies(link: SuperLink, place: Path, load: Load) -> list[float]:
    """Each client's seconds of an exchange in which nothing is computed, without those of its bytes on the link."""
    sent = load.exchanges[0]
    down = [sent[client].bytes_down for client in sorted(sent)]
    up = [sent[client].bytes_up for client in sorted(sent)]
    tree = experiment_of("fedavg", 1).tree()
    tree["method"] = {"name": str(EMPTY), "down": down, "up": up}
    notes = lines(carried_out(link, place, resolve(tree)) / ROUNDS)[0]["notes"]
    links = [TwinDevice(down_mbit=of.down_mbit, up_mbit=of.up_mbit) for of in DEVICES]
    carrying = [one.seconds(0, *sizes)[1] for one, *sizes in zip(links, down, up, strict=True)]
    return [notes[f"client{client}"] - seconds for client, seconds in enumerate(carrying)]


def speeds(folder: Path, rounds: range) -> list[dict[str, float | None]]:
    """Each client's speeds in some rounds of the run that ended last: gigaflops, as a twin has them."""
    spent = [line for line in lines(folder / COSTS) if line["round"] in rounds]

    def speed(client: int, later: bool) -> float | None:
        jobs = [line for line in lines(folder.parent / DEVICES[client].name / "audit.jsonl") if line["round"]]
        asked = [line for line in jobs if line["run"] == jobs[-1]["run"] and line["asked"] != "evaluation"]
        timed = [line for line in asked if line["round"] in rounds and (line["asked"] != asked[0]["asked"]) == later]
        done = [line for line in spent if line["client"] == client and (line["exchange"] > 1) == later]
        flops = sum(line["flops"] for line in done)
        return flops * 1e-9 / sum(line["seconds"] for line in timed) if flops else None

    return [{"gflops": speed(client, False), "gflops_later": speed(client, True)} for client in range(len(DEVICES))]


def foreseen(
    experiment: Experiment, loads: Sequence[Load], speeds: Sequence[Mapping[str, Any]], waits: Sequence[float]
) -> dict[str, Any]:
    """Each round's seconds, and the bytes of all, as the twin has them."""
    devices = [
        TwinDevice(str(client), down_mbit=of.down_mbit, up_mbit=of.up_mbit, latency_s=wait, **speed)
        for client, (speed, wait, of) in enumerate(zip(speeds, waits, DEVICES, strict=True))
    ]
    run = experiment.run
    rounds = simulate(run.course(Fleet(devices, list(range(len(DEVICES))))), loads, run.needed)
    parts = [part for load in loads for exchange in load.exchanges for part in exchange.values()]
    return {
        "seconds": [timed.end - timed.start for timed in rounds],
        "bytes": sum(part.bytes_down + part.bytes_up for part in parts),
    }


def found(folder: Path) -> dict[str, Any]:
    """Each round's seconds, and the bytes of all, as they were."""
    seconds = [line["seconds_local"] + line["seconds_server"] for line in lines(folder / TIMINGS)]
    sent = sum(line["bytes_down"] + line["bytes_up"] for line in lines(folder / COSTS))
    return {
        "seconds": seconds,
        "bytes": sent,
        "failures": sum(len(line["failed"]) for line in lines(folder / ROUNDS)),
    }


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of each deployment, in turns: what was measured of the devices, what the twin foresees, and what was."""
    with TemporaryDirectory(prefix="nodes-") as folder, ExitStack() as ends:
        place, quotas = Path(folder), [ends.enter_context(Quota(device)) for device in DEVICES]
        served = ends.enter_context(deployed(place, quotas))
        for repeat, method in product(range(options.repeats), options.methods):
            experiment, name = experiment_of(method, options.rounds), f"{method}-{repeat}"
            loads = loads_of(experiment)
            waits = latencies(served, place / f"empty-{name}", loads[-1])
            trial = carried_out(served, place / f"trial-{name}", experiment_of(method, TRIAL))
            known, once = speeds(trial, range(FIRST + 1, TRIAL + 1)), speeds(trial, range(TRIAL, TRIAL + 1))
            before = granted(quotas)
            twin = foreseen(experiment, loads, known, waits)
            real = found(run := carried_out(served, place / name, experiment))
            least = [min(pair) for pair in zip(before, granted(quotas), strict=True)]
            others = {"once": once, "told": speeds(run, range(1, options.rounds + 1))}
            also = {name: {"speeds": each, **foreseen(experiment, loads, each, waits)} for name, each in others.items()}
            measured = {"speeds": known, "latency_s": waits, "granted": least}
            yield {"method": method, "repeat": repeat, **measured, "foreseen": twin, "was": real, **also}


def table(readings: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each method, what was foreseen and what was; and of their quotas what devices could have at the least.

    *From one*: how far off the twin would have been, had the trial's last round alone been timed, in which each device
    computes once with its network. *With its speeds*: had it known the speeds that devices had in the deployment.
    """
    names = "method", "foreseen, s", "took, s", "off by", "median", "from one", "median", "with its speeds"
    rows = [f"| {' | '.join((*names, 'bytes foreseen', 'bytes', 'of quotas'))} |"]
    rows.append("|---|---|---|---|--:|---|--:|---|--:|--:|---|")
    for method in dict.fromkeys(reading["method"] for reading in readings):
        mine = [reading for reading in readings if reading["method"] == method]
        runs = "foreseen", "was", "once", "told"
        said, took, once, told = ([sum(one[name]["seconds"]) for one in mine] for name in runs)
        off, by_one, still = ([one / real - 1 for one, real in zip(of, took, strict=True)] for of in (said, once, told))
        sizes = [sorted({one[name]["bytes"] for one in mine}) for name in ("foreseen", "was")]
        cells = [method, *(", ".join(f"{seconds:.1f}" for seconds in each) for each in (said, took))]
        for each in (off, by_one):
            cells += [", ".join(f"{one:+.1%}" for one in each), f"{median(each):+.1%}"]
        cells.append(", ".join(f"{one:+.1%}" for one in still))
        cells += [", ".join(f"{size:,}" for size in each) for each in sizes]
        cells.append(", ".join(f"{min(one['granted']):.0%}" for one in mine))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="of each deployment")
    parser.add_argument("--repeats", type=int, default=3, help="deployments of each method")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("twin_nodes.json"), help="where all readings go")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nodes are ended, and groups removed
    readings: list[dict[str, Any]] = []
    for reading in measured(options):
        readings.append(reading)
        print(json.dumps(reading), file=sys.stderr, flush=True)
        options.out.write_text(json.dumps({"machine": describe(), "readings": readings}, indent=1) + "\n")
    print(shlex.join(["python", *sys.argv]), *table(readings), sep="\n")


if __name__ == "__main__":
    main()
