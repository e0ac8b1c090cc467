"""What secure sums cost a client and the server, by the number of clients.

    OMP_NUM_THREADS=1 python benchmarks/secure.py [--clients 10 100 1000] [--numbers 10000]

A network of so many numbers in three nested widths, a third of the clients with each. Three tenths of the clients
leave: half of them after step 1, half when all have their shares. Seconds are of the processor, all in one process,
which reads the agreement once for all; of clients the mean, by step. Bytes are those of the messages. The page is
`benchmarks/results/secure.md`, written anew after each number of clients.
"""

import argparse
import json
import platform
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from potluck.secure import ANSWERS
from potluck.secure.agreement import Agreement
from potluck.secure.client import SecureClient
from potluck.secure.coverage import Coverage, Summand, piece_shape
from potluck.secure.fixed import FixedPoint
from potluck.secure.server import SecureServer
from potluck.secure.together import Addend, answered, new_identities, public_keys
from potluck.testing.summing import half_of

PAGE = Path(__file__).parent / "results" / "secure.md"
SHARES = (1.0, 0.5, 0.25)  # of the width


def round_of(clients: int, numbers: int) -> tuple[Agreement, dict[int, Any], dict[int, Addend]]:
    """An agreement of so many clients on about so many numbers, their identities, and what they add."""
    width = round(numbers**0.5)
    kinds = [{"w": tuple(((0, max(1, round(share * width))),) for _ in range(2))} for share in SHARES]
    coverage = Coverage({"w": Summand((width, width))}, kinds, {i: i % len(kinds) for i in range(clients)})
    identities = new_identities(range(clients))
    generator = torch.Generator().manual_seed(0)
    addends = {
        client: Addend({"w": torch.randn(piece_shape(kinds[kind]["w"]), generator=generator)})
        for client, kind in coverage.kinds.items()
    }
    return Agreement("cost", 1, public_keys(identities), coverage, FixedPoint()), identities, addends


def measured(clients: int, numbers: int) -> dict[str, Any]:
    """Seconds and bytes of one round."""
    agreement, identities, addends = round_of(clients, numbers)
    gone = int(0.3 * clients)
    leaving = {client: 1 + client % 2 for client in range(gone)}
    server, halves = SecureServer(agreement), dict[int, SecureClient]()
    of_client, count, sent, of_server = defaultdict[str, float](float), Counter[str](), Counter[str](), 0.0
    while not server.done:
        name = ANSWERS[server.step]
        for client in server.asked:
            if leaving.get(client, len(ANSWERS)) <= server.step:
                continue
            start = time.process_time()
            request = server.request(client)
            of_server += time.process_time() - start
            start = time.process_time()
            if server.step == 0:
                halves[client] = half_of(request, client, identities)
            answer = answered(halves[client], server.step, request, addends[client])
            of_client[name] += time.process_time() - start
            count[name] += 1
            sent["down"] += len(request)
            sent["up"] += len(answer)
            start = time.process_time()
            server.take(client, answer)
            of_server += time.process_time() - start
        start = time.process_time()
        server.close()
        of_server += time.process_time() - start
    start = time.process_time()
    sums = server.sums()
    unmasking = time.process_time() - start
    survivors = [client for client in range(clients) if client not in leaving]
    assert sums.survivors == tuple(survivors)
    return {
        "clients": clients,
        "numbers": numbers,
        "client": {name: of_client[name] / count[name] for name in ANSWERS},
        "passing": of_server,
        "unmasking": unmasking,
        "up": sent["up"] / clients,
        "down": sent["down"] / clients,
        "plain": 4 * numbers,
    }


def page(lines: list[dict[str, Any]]) -> str:
    """The table, a row for each number of clients."""
    shown = ["# What secure sums cost", "", *(__doc__ or "").split("\n\n")[2].splitlines(), ""]
    shown += [
        "| clients | a client: " + " | ".join(ANSWERS) + " | all, s | server: passing on, s | unmasking, s"
        " | up a client, kB | down, kB |",
        "|" + "---:|" * (5 + len(ANSWERS) + 1),
    ]
    for line in lines:
        steps = [line["client"][name] for name in ANSWERS]
        seconds = [f"{value:.3f}" for value in (*steps, sum(steps))]
        rest = [
            f"{line['passing']:.1f}",
            f"{line['unmasking']:.1f}",
            *(f"{line[way] / 1000:,.0f}" for way in ("up", "down")),
        ]
        shown.append(f"| {line['clients']:,} | {' | '.join([*seconds, *rest])} |")
    shown += [
        "",
        f"{lines[0]['numbers']:,} numbers, {lines[0]['plain'] / 1000:,.0f} kB where nothing is masked. Python"
        f" {platform.python_version()}, one core of {platform.machine()}.",
        "",
        "Made by `python benchmarks/secure.py`, a row for each number of clients that was measured.",
    ]
    return "\n".join(shown) + "\n"


def main() -> None:
    """Measure, smallest first, and write the page after each."""
    parser = argparse.ArgumentParser(description="What secure sums cost.")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--numbers", type=int, default=10_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for clients in sorted(given.clients):
        lines.append(measured(clients, given.numbers))
        PAGE.write_text(page(lines), encoding="utf-8")
        print(json.dumps(lines[-1]), flush=True)


if __name__ == "__main__":
    main()
