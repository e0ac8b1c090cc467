"""The results as Markdown, from the file that they were written to."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from entries import plural

Record = dict[str, Any]
HEAD = [
    "contestant",
    "s a round",
    "min to max",
    "wall time ÷ Potluck's",
    "CPU time ÷ Potluck's",
    "s to the end of round 1",
]


def page(results: Record) -> Iterator[str]:
    """Everything that is printed."""
    machine = results["machine"]
    load = ", ".join(f"{value:.2f}" for value in machine["load_average_before"])
    yield f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']};"
    yield f"load average before: {load}; Potluck at {machine['commit']}."
    yield "Versions: " + ", ".join(f"{name} {'/'.join(found)}" for name, found in sorted(_versions(results).items()))
    if results["smoke"]:
        yield "\n**In small, to see whether everything runs: these are no measurements.**"
    yield from _summary(results["workloads"])
    for name, played in results["workloads"].items():
        yield from _section(name, played, results["repeats"])
    yield "\n### Caveats\n"
    yield from (f"- {framework}: {text}" for framework, text in results["caveats"].items())


def _summary(workloads: Record) -> Iterator[str]:
    """By framework and workload the ratios of the fastest variant."""
    yield "\n### Wall time, and CPU time in parentheses, as multiples of Potluck's in float32 on all cores\n"
    yield f"| framework | {' | '.join(workloads)} |"
    yield f"|{'---|' * (len(workloads) + 1)}"
    fastest = {
        name: {record["framework"]: record for record in _fastest(played["contestants"])}
        for name, played in workloads.items()
    }
    for framework in dict.fromkeys(framework for found in fastest.values() for framework in found):
        cells = [_both_ratios(fastest[name].get(framework), played) for name, played in workloads.items()]
        yield f"| {framework} | {' | '.join(cells)} |"


def _both_ratios(record: Record | None, played: Record) -> str:
    if record is None:
        return "–"
    base = _named(played["contestants"], played["base"])
    return f"{ratio(record, base, 'seconds')} ({ratio(record, base, 'cpu_seconds')})"


def _section(name: str, played: Record, repeats: int) -> Iterator[str]:
    workload, contestants = played["workload"], played["contestants"]
    yield f"\n### {name}\n"
    yield (
        f"{workload['clients']} clients, {workload['cohort']} a round, {workload['examples']} examples each, batches of"
        f" {workload['batch_size']}, {played['steps']} optimiser steps a round; {', '.join(workload['nets'])}. Medians"
        f" of {plural(repeats, 'round')}.\n"
    )
    yield from _table(contestants, _named(contestants, played["base"]))
    for other in [record for record in contestants if record["apart"] == "another precision" and record["readings"]]:
        yield f"\nThe same against {label(other)}, which is {other['apart']}:\n"
        yield from _table([record for record in contestants if record["apart"] is None or record is other], other)
    others = sum(reading["others_cpu_seconds"] for record in contestants for reading in record["readings"])
    if others:
        yield f"\nWho waited took {others:.2f} s of CPU time in all while others played, and should have taken none."


def _table(contestants: list[Record], base: Record | None) -> Iterator[str]:
    """One line a contestant; a star at the fastest variant of each framework."""
    yield f"| {' | '.join(HEAD)} |"
    yield f"|{'---|' * len(HEAD)}"
    fastest = [id(record) for record in _fastest(contestants)]
    for record in contestants:
        name = label(record) + (f" ({record['apart']})" if record["apart"] else "")
        if record["error"] is not None:
            yield f"| {name} | failed: `{record['error']}` |{' |' * (len(HEAD) - 2)}"
            continue
        seconds = [reading["seconds"] for reading in record["readings"]]
        star = " \\*" if id(record) in fastest else ""
        cells = [
            name + star,
            f"{median(seconds):.3f}",
            f"{min(seconds):.3f} to {max(seconds):.3f}",
            ratio(record, base, "seconds"),
            ratio(record, base, "cpu_seconds"),
            f"{record['start']['seconds']:.1f}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield "\n\\* The fastest variant of a framework: the one to compare."


def _fastest(contestants: list[Record]) -> Iterator[Record]:
    """Of each framework, among its variants that compute the same."""
    rivals = [record for record in contestants if record["apart"] is None and record["error"] is None]
    for framework in dict.fromkeys(record["framework"] for record in rivals):
        variants = [record for record in rivals if record["framework"] == framework]
        yield min(variants, key=lambda record: median(reading["seconds"] for reading in record["readings"]))


def ratio(record: Record, base: Record | None, clock: str) -> str:
    """The median over repeats of the quotient within a repeat, so that what slows a whole repeat cancels."""
    if base is None or base["error"] is not None:
        return "–"
    ours = {reading["repeat"]: reading[clock] for reading in base["readings"]}
    quotients = [reading[clock] / ours[reading["repeat"]] for reading in record["readings"] if ours[reading["repeat"]]]
    return f"{median(quotients):.2f}" if quotients else "–"


def label(record: Record) -> str:
    """Framework and variant."""
    return f"{record['framework']}, {record['variant']}"


def _named(contestants: list[Record], name: str) -> Record | None:
    return next((record for record in contestants if label(record) == name), None)


def _versions(results: Record) -> dict[str, list[str]]:
    """By package, the versions that contestants reported."""
    found: dict[str, list[str]] = {}
    for played in results["workloads"].values():
        for record in played["contestants"]:
            for package, version in record["start"].get("versions", {}).items():
                if version not in found.setdefault(package, []):
                    found[package].append(version)
    return found
