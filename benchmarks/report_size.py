"""How large the report on many methods is, and how long a browser takes to open it.

    python benchmarks/report_size.py [--methods 50] [--rounds 20] [--runs FOLDER]

Every method is run on a part of the digits, as far as it can be run there, with six clients of three architectures; the
first 50 that finish are reported. Finished runs in the folder are not repeated. The page is opened in headless Chromium
from the disk, five times, each in a fresh context: from the request to the moment at which the curves are drawn. Then
all numbers of the page's tables and curves are compared with the records. The results go to
`benchmarks/results/report_size.md`.
"""

import argparse
import json
import platform
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from potluck.analysis.embedded import series_of, shown
from potluck.analysis.read import StoredRun, read_run
from potluck.analysis.report import write_report
from potluck.core.errors import PotluckError
from potluck.experiment.assemble import assemble
from potluck.experiment.execute import execute, prepare
from potluck.experiment.presets import experiment_for
from potluck.methods import list_methods
from potluck.records import MANIFEST

RESULTS = Path(__file__).parent / "results" / "report_size.md"
SETTINGS = (
    "federation.clients=6",
    "federation.models=[{name='cnn2',width=4},{name='cnn3',width=4},{name='cnn4',width=4}]",
    "federation.public=holdout",
    "federation.public_labels=true",
    "federation.validation_fraction=0.1",
    "federation.train_fraction=0.15",
    "run.executor=sequential",
)
WAYS = ((), ("federation.models=[{name='cnn4',width=4}]",), ("federation.models=['mlp2']",))
"""A method that cannot run with three architectures is given one."""
OPENINGS = 5


def finished(folder: Path, rounds: int) -> bool:
    """Whether this folder holds a run that has ended."""
    path = folder / MANIFEST
    return path.is_file() and json.loads(path.read_text()).get("status") == "finished" and rounds > 0


def run_one(method: str, rounds: int, folder: Path) -> bool:
    """Run one method; whether it could be run."""
    for way in WAYS:
        try:
            experiment = experiment_for(method, [f"run.rounds={rounds}", *SETTINGS, *way])
            assembly = assemble(experiment)
            shutil.rmtree(folder, ignore_errors=True)
            execute(prepare(experiment, assembly, folder), experiment, folder)
        except PotluckError as error:
            print(f"{method}: {error}", flush=True)
        else:
            return True
    return False


def run_methods(count: int, rounds: int, parent: Path) -> list[Path]:
    """The folders of as many finished runs of different methods."""
    folders: list[Path] = []
    for method in list_methods():
        if len(folders) == count:
            break
        folder, started = parent / method, time.perf_counter()
        if finished(folder, rounds) or run_one(method, rounds, folder):
            folders.append(folder)
            print(f"{len(folders)} of {count}: {method}, {time.perf_counter() - started:.0f} s", flush=True)
    return folders


def opened(browser: Browser, page_file: Path) -> tuple[float, float]:
    """Seconds until the page's first paint, and until its curves are drawn."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    started = time.perf_counter()
    page.goto(page_file.as_uri(), wait_until="load")
    page.wait_for_selector("#chart svg .line")
    drawn = time.perf_counter() - started
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN")
    page.context.close()
    return painted / 1000, drawn


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
    for run, row in zip(runs, sorted(cells, key=lambda cells: [r.method for r in runs].index(cells[0])), strict=True):
        found = by_name[row[0]]
        for series in series_of(runs):
            if series.id not in found["curves"]:
                continue
            at, values = found["curves"][series.id]
            for number, value in zip(content["rounds"][at], values, strict=True):
                recorded = series.value(run.rounds[number - 1])
                compared += 1
                same = recorded is not None and abs(recorded - value) <= 5e-6 * abs(recorded)
                if not same or shown(value, series.percent) != shown(recorded, series.percent):
                    wrong.append(f"{row[0]}, {series.id}, round {number}: {value} and {recorded}")
        last = run.rounds[-1]
        expected = [
            "–" if (value := last.value(measure, run.metric.name)) is None else shown(value, run.metric.percent)
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
    parser.add_argument("--methods", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--runs", type=Path, default=Path("runs/report_size"))
    options = parser.parse_args()
    folders = run_methods(options.methods, options.rounds, options.runs)
    started = time.perf_counter()
    page_file = write_report(folders, options.runs / "report").resolve()
    took = time.perf_counter() - started
    runs = [read_run(folder) for folder in folders]
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        times = [opened(browser, page_file) for _ in range(OPENINGS)]
        compared, wrong = differing_numbers(page_file, runs, browser)
        version = browser.version
        browser.close()
    painted, drawn = (statistics.median(of) for of in zip(*times, strict=True))
    size, lines = page_file.stat().st_size, (page_file.parent / "report.md").read_text().count("\n")
    text = f"""# The report on many methods

    python benchmarks/report_size.py --methods {options.methods} --rounds {options.rounds}

{machine()}, headless Chromium {version}; median of {OPENINGS} openings from the disk, each in a fresh context, the
slowest in brackets. {len(runs)} methods with one seed, {sum(len(run.rounds) for run in runs)} rounds in all, every one
evaluated.

| | |
| --- | ---: |
| `report.html` | {size / 1e6:.2f} MB |
| `report.md` | {lines} lines |
| writing the report | {took:.1f} s |
| first paint | {painted:.2f} s ({max(p for p, _ in times):.2f}) |
| curves drawn | {drawn:.2f} s ({max(d for _, d in times):.2f}) |
| numbers of the page compared with the records | {compared:,} |
| of them different | {len(wrong)} |
"""
    RESULTS.write_text(text)
    print(text, *wrong[:20], sep="\n")


if __name__ == "__main__":
    main()
