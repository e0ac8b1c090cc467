"""How large the report on a sweep over all methods is, and how long a browser takes to open it.

    python benchmarks/report_size.py [--runs FOLDER] [KEY=VALUE ...]

A sweep over all methods, on the federation of `benchmarks/report_size.toml`, runs every method on a part of the digits
with four clients, each round evaluated; finished runs in the folder are not repeated. The page is opened in headless
Chromium from the disk, five times, each in a fresh context: from the request to the moment at which the curves are
drawn. Then all numbers of the page's curves and of its table of runs are compared with the records. The results go to
`benchmarks/results/report_size.md`.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from potluck.analysis.embedded import page_value, series_of
from potluck.analysis.names import run_names
from potluck.analysis.read import StoredRun, find_runs, read_run
from potluck.analysis.report import write_report
from potluck.methods import list_methods

RESULTS = Path(__file__).parent / "results" / "report_size.md"
SWEEP = Path(__file__).with_suffix(".toml")
OPENINGS = 5


def sweep_of_all() -> str:
    """The sweep: the federation, and every method."""
    return f'{SWEEP.read_text()}\n[sweep]\n"method.name" = {json.dumps(list_methods())}\n'


def opened(browser: Browser, page_file: Path) -> tuple[float, float, float]:
    """Seconds until the page's first paint, until its curves are drawn, and of the page's processor time until then."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    counters = page.context.new_cdp_session(page)
    counters.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(page_file.as_uri(), wait_until="load")
    page.wait_for_selector("#chart svg .line")
    drawn = page.evaluate(
        "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    )  # scripts ran before
    found = {item["name"]: item["value"] for item in counters.send("Performance.getMetrics")["metrics"]}
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN")
    page.context.close()
    return painted / 1000, drawn / 1000, found["TaskDuration"]


def differing_numbers(page_file: Path, runs: Sequence[StoredRun], browser: Browser) -> tuple[int, list[str]]:
    """How many numbers of the page were compared with the records, and those that differ."""
    page = browser.new_page()
    page.goto(page_file.as_uri())
    content: dict[str, Any] = json.loads(page.text_content("#numbers") or "{}")
    cells: list[list[str]] = page.eval_on_selector_all(
        "#runs tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    page.close()
    by_name = {run["name"]: run for experiment in content["experiments"] for run in experiment["runs"]}
    compared, wrong = 0, list[str]()
    rows = {row[0]: row for row in cells}
    for run, name in zip(runs, run_names(runs), strict=True):
        found, row = by_name[name], rows[name]
        for series in series_of(runs):
            if series.id not in found["curves"]:
                continue
            at, values = found["curves"][series.id]
            for number, value in zip(content["rounds"][at], values, strict=True):
                recorded = series.value(run.rounds[number - 1])
                compared += 1
                same = recorded is not None and abs(recorded - value) <= 5e-6 * abs(recorded)
                if not same or page_value(value, series.percent) != page_value(recorded, series.percent):
                    wrong.append(f"{row[0]}, {series.id}, round {number}: {value} and {recorded}")
        last = run.rounds[-1]
        expected = [
            "–" if (value := last.value(measure, run.metric.name)) is None else page_value(value, run.metric.percent)
            for measure in ("personal", "personal_std", "personal_worst", "common", "global")
        ]
        compared += len(expected)
        wrong += [f"{row[0]}: {row[3:8]} and {expected}"] if row[3:8] != expected else []
    return compared, wrong


def machine() -> str:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores, {platform.system()}"


def main() -> None:
    """Run, report, measure, compare, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/report_size"))
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    # What a run that fails says is in the sweep's output; the report is on the others.
    options.runs.mkdir(parents=True, exist_ok=True)
    sweep = options.runs / "sweep.toml"
    sweep.write_text(sweep_of_all())
    command = [sys.executable, "-m", "potluck", "sweep", str(sweep), *options.overrides, "--to", str(options.runs)]
    subprocess.run(command, check=False)
    folders = find_runs([options.runs])
    started = time.perf_counter()
    page_file = write_report(folders, options.runs).resolve()
    took = time.perf_counter() - started
    runs = [read_run(folder) for folder in folders]
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        times = [opened(browser, page_file) for _ in range(OPENINGS)]
        compared, wrong = differing_numbers(page_file, runs, browser)
        version = browser.version
        browser.close()
    painted, drawn, busy = (f"{statistics.median(of):.2f} s ({max(of):.2f})" for of in zip(*times, strict=True))
    size, lines = page_file.stat().st_size, (page_file.parent / "report.md").read_text().count("\n")
    rounds = sum(len(run.rounds) for run in runs)
    text = f"""# The report on a sweep

    {" ".join(["python", "benchmarks/report_size.py", *options.overrides])}

{machine()}, headless Chromium {version}; median of {OPENINGS} openings from the disk, each in a fresh context, the
slowest in brackets; {os.getloadavg()[0]:.0f} processes wanted a core meanwhile.
{len({run.method for run in runs})} methods, {len(runs)} runs, {rounds} rounds in all, every one evaluated.

| | |
| --- | ---: |
| `report.html` | {size / 1e6:.2f} MB |
| `report.md` | {lines} lines |
| writing the report | {took:.1f} s |
| first paint | {painted} |
| curves drawn | {drawn} |
| processor time of the page until then | {busy} |
| numbers of the page compared with the records | {compared:,} |
| of them different | {len(wrong)} |
"""
    RESULTS.write_text(text)
    print(text, *wrong[:20], sep="\n")


if __name__ == "__main__":
    main()
