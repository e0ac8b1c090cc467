"""How a contestant talks to the referee: `ready` once, then one measured round for every line on standard input.

    contestant: ready {"parameters": 199210, "first_round_seconds": 0.9, "versions": {"torch": "2.13.0"}}
    referee:    go
    contestant: {"seconds": 0.41, "steps": 260}

At end of file the contestant ends. A round is what lies between choosing the clients and the averaged weights; nothing
is evaluated.
"""

import json
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from workloads import WORKLOADS


def parser(description: str | None) -> ArgumentParser:
    """Of the options that every contestant has."""
    found = ArgumentParser(description=description)
    found.add_argument("--workload", choices=WORKLOADS, required=True)
    found.add_argument("--smoke", action="store_true", help="the workload in small")
    return found


class Turns:
    """The contestant's end of the line, and the clock. The first round is not measured: it belongs to the start.

    Args:
        packages: distributions whose versions are reported.
    """

    def __init__(self, *packages: str) -> None:
        # What a framework prints must not end up between the answers.
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._versions = {package: version(package) for package in packages}
        self._started = time.perf_counter()

    def start_clock(self) -> None:
        """A round begins."""
        self._started = time.perf_counter()

    def stop_clock(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._started

    def ready(self, parameters: int, first_round_seconds: float, **facts: Any) -> None:
        """Say that the first round is over."""
        told = {"parameters": parameters, "first_round_seconds": first_round_seconds, "versions": self._versions}
        self._out.write(f"ready {json.dumps(told | facts)}\n")

    def wait(self) -> bool:
        """Wait for the next turn; False if there is none."""
        return sys.stdin.readline() != ""

    def report(self, seconds: float, steps: int) -> None:
        """Say how long the round was, and how many optimiser steps its clients took."""
        self._out.write(json.dumps({"seconds": seconds, "steps": steps}) + "\n")


def play(turns: Turns, play_round: Callable[[int], int], parameters: int, **facts: Any) -> None:
    """Take turns until there are no more.

    Args:
        turns: the line to the referee.
        play_round: plays the round of a number, from 1, and counts optimiser steps.
        parameters: trained numbers of the net.
        facts: what else the referee should write down.
    """
    turns.start_clock()
    play_round(1)
    turns.ready(parameters, turns.stop_clock(), **facts)
    number = 2
    while turns.wait():
        turns.start_clock()
        steps = play_round(number)
        turns.report(turns.stop_clock(), steps)
        number += 1
