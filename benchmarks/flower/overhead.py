"""What a round over nodes takes where nothing is computed, beside a round of a bare Flower app.

    python benchmarks/flower/overhead.py [--nodes 3 10] [--rounds 5] [--repeats 3] [--out overhead.json]

One SuperLink behind the gate and as many nodes on this machine, over TLS with keys. In turns, repeat by repeat, a bare
Flower app and Potluck send every node an empty message, and one of 45 MB, and get as much back. Potluck's nodes run no
app but its own, so the bare app has nodes of Flower's, which look for messages every three seconds; so rounds begin at
random moments. A run's first round, in which nodes read data and build models, is left out of the table. Needs the
extra `flower`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from potluck.experiment.settings.resolve import resolve
from potluck.flower.deploy.gate import Gate
from potluck.flower.deploy.keys import add_node, certify
from potluck.flower.deploy.processes import free_port, start, stop
from potluck.flower.deploy.superlink import SuperLink
from potluck.flower.node.join import Credentials
from potluck.flower.server.hosting import run_app, write_app
from potluck.records import TIMINGS

HERE = Path(__file__).parent
ECHO = HERE / "echo.py"
SIZES = {"empty": 4, "45 MB": 45_000_000}
"""Bytes each way, by name."""


@contextmanager
def deployed(place: Path, count: int, way: str) -> Iterator[SuperLink]:
    """A SuperLink behind its gate, and nodes that have joined: Potluck's, or Flower's for the bare app."""
    keys, port = place / "keys", free_port()
    certify(keys, [], days=1)
    names = [f"n{number:02d}" for number in range(count)]
    for name in names:
        add_node(keys, name)
    nodes: list[subprocess.Popen[bytes]] = []
    with SuperLink(place / "link", keys) as link, Gate(("127.0.0.1", port), link.address, keys, print, link.trust):
        link.register()
        try:
            for name in names:
                (place / name).mkdir()
                log, at = place / f"{name}.log", f"127.0.0.1:{port}"
                if way == "Potluck":
                    words = ["join", at, "--keys", f"{keys}/nodes/{name}", "--state", f"{place}/{name}"]
                    nodes.append(start("potluck", [*words, "--allow-code", str(ECHO)], place / name, log))
                else:
                    words = [*Credentials(at, keys / "nodes" / name).options(), "--port", str(free_port())]
                    nodes.append(start("flower-supernode", words, place / name, log))
            yield link
        finally:
            for node in nodes:
                stop(node)


def bare(link: SuperLink, place: Path, count: int, size: int, rounds: int) -> list[float]:
    """Seconds of each round of the bare app."""
    out, app = place / "bare.json", place / "bare"
    app.mkdir(exist_ok=True)
    (app / "bare_app.py").write_text((HERE / "bare" / "bare_app.py").read_text())
    config = {"nodes": count, "bytes": size, "rounds": rounds, "out": str(out)}
    components = {"serverapp": "bare_app:server_app", "clientapp": "bare_app:client_app"}
    flower: dict[str, Any] = {"publisher": "benchmark", "components": components, "config": config}
    project = {"name": "bare", "version": "0.1.0", "description": "bare", "license": "Apache-2.0"}
    described = {"project": {**project, "dependencies": ["flwr>=1.41,<2"]}, "tool": {"flwr": {"app": flower}}}
    (app / "pyproject.toml").write_text(tomli_w.dumps(described))
    out.unlink(missing_ok=True)
    link.submit(app)
    while not out.is_file():
        link.check()
        time.sleep(0.5)
    time.sleep(2.0)  # Flower's own programs end
    return json.loads(out.read_text())


def ours(link: SuperLink, place: Path, count: int, size: int, rounds: int, name: str) -> list[float]:
    """Seconds of each round's exchange in Potluck."""
    run = place / name
    run.mkdir()
    tree = {
        "federation": {"dataset": "digits", "clients": count, "models": ["cnn2"]},
        "method": {"name": str(ECHO), "size": size},
        "run": {"rounds": rounds, "evaluate_every": rounds, "common_test": False},
    }
    app = write_app(place / f"app-{name}", resolve(tree), run)
    for _ in run_app(link, app, run, lambda line: None):
        pass
    time.sleep(2.0)
    return [json.loads(line)["seconds_local"] for line in (run / TIMINGS).read_text().splitlines()]


def measure(count: int, messages: list[str], rounds: int, repeats: int) -> Iterator[dict[str, Any]]:
    """One reading a size, way and repeat."""
    for repeat in range(repeats):
        for way in ("bare Flower", "Potluck") if repeat % 2 == 0 else ("Potluck", "bare Flower"):
            with TemporaryDirectory(prefix="overhead-") as folder, deployed(Path(folder), count, way) as link:
                for name in messages:
                    size, word = SIZES[name], name.split()[0]
                    if way == "Potluck":
                        seconds = ours(link, Path(folder), count, size, rounds, word)
                    else:
                        seconds = bare(link, Path(folder), count, size, rounds)
                    reading = {"nodes": count, "message": name, "way": way, "seconds": seconds}
                    print(json.dumps(reading), file=sys.stderr, flush=True)
                    yield reading


def table(readings: list[dict[str, Any]]) -> str:
    """Medians over all rounds but the first of each run."""
    lines = ["| nodes | message | bare Flower, s | Potluck, s | of bare Flower's |", "|---|---|---|---|---|"]
    for count, message in dict.fromkeys((reading["nodes"], reading["message"]) for reading in readings):
        found = {
            way: median(
                second
                for reading in readings
                if (reading["nodes"], reading["message"], reading["way"]) == (count, message, way)
                for second in reading["seconds"][1:]
            )
            for way in ("bare Flower", "Potluck")
        }
        share = found["Potluck"] / found["bare Flower"]
        lines.append(f"| {count} | {message} | {found['bare Flower']:.1f} | {found['Potluck']:.1f} | {share:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 10], help="how many")
    parser.add_argument("--messages", choices=SIZES, nargs="+", default=list(SIZES), help="how large")
    parser.add_argument("--rounds", type=int, default=5, help="of each run; the first is left out")
    parser.add_argument("--repeats", type=int, default=3, help="of every run")
    parser.add_argument("--out", type=Path, help="file for all readings, in JSON")
    options = parser.parse_args()
    readings = [
        reading
        for count in options.nodes
        for reading in measure(count, options.messages, options.rounds, options.repeats)
    ]
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    if options.out:
        options.out.write_text(json.dumps({"machine": machine, "readings": readings}, indent=1) + "\n")
    print(f"{machine}\n\n{table(readings)}")


if __name__ == "__main__":
    main()
