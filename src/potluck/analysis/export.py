"""A table as text: Markdown, CSV or LaTeX, chosen by the file's name."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.analysis.compare import ComparedRow, Interval, Reached
from potluck.core.errors import ConfigError
from potluck.records import MAIN_MEASURES, TITLES, Measure, Metric

_NOTHING = "–"
_TEX = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})


@dataclass(frozen=True)
class Table:
    """Cells of text under headings; the first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_TAKEN = ("rounds", "megabytes", "seconds")


def table_of(rows: Sequence[ComparedRow], metric: Metric) -> Table:
    """A comparison as cells: values with the half widths of their intervals; p below 0.05 has a star."""
    unit = " (%)" if metric.percent else ""
    measured: list[Measure] = [of for of in MAIN_MEASURES if any(row.scores[of] for row in rows)]
    compared, timed = any(row.difference for row in rows), any(row.seconds for row in rows)
    columns = ["", "seeds", *(f"{TITLES[of]}{unit}" for of in measured)]
    columns += [*(["difference", "p"] if compared else []), "MB", *(["seconds"] if timed else [])]
    lines: list[tuple[str, ...]] = []
    for row in rows:
        cells = [row.label, str(len(row.seeds)), *(_scored(metric, row.scores[of]) for of in measured)]
        if compared:
            cells += [_signed(metric, row.difference.by), _p(row.difference.p)] if row.difference else [_NOTHING] * 2
        lines.append((*cells, _amount(row.megabytes), *([_amount(row.seconds)] if timed else [])))
    return Table(tuple(columns), tuple(lines))


def target_table_of(rows: Sequence[ComparedRow]) -> Table:
    """What it took to reach the target, mean over the seeds that did."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        reached = row.reached or Reached(0, len(row.seeds))
        rounds = _NOTHING if reached.rounds is None else f"{reached.rounds.mean:.4g}"
        arrived = f"{reached.count} of {reached.seeds}"
        lines.append((row.label, arrived, rounds, _amount(reached.megabytes), _amount(reached.seconds)))
    return Table(("", "seeds", "rounds", "MB", "seconds"), tuple(lines))


def caption(rows: Sequence[ComparedRow], measure: Measure, against: str | None = None) -> str:
    """What the numbers of a comparison are, in a sentence or two.

    Args:
        rows: of the comparison.
        measure: by which they are compared.
        against: label of the reference; by default the first.
    """
    words = ["Means over clients"]
    if any(len(row.seeds) > 1 for row in rows):
        words = ["Means over clients and seeds ± half of the interval of 95 % confidence over seeds"]
    reference = next((row.label for row in rows if row.difference is None), None)
    if reference and len(rows) > 1:
        words.append(f"difference from {against or rows[0].label} within a seed ({TITLES[measure]})")
    if any(row.difference and row.difference.p is not None for row in rows):
        words.append("p of a paired t-test, adjusted by Holm's method; * below 0.05")
    return "; ".join(words) + "."


def _scored(metric: Metric, value: Interval | None) -> str:
    if value is None:
        return _NOTHING
    half = "" if value.half is None else f" ± {_score(metric, value.half)}"
    return f"{_score(metric, value.mean)}{half}"


def _signed(metric: Metric, value: Interval) -> str:
    return f"{'+' if value.mean > 0 else ''}{_scored(metric, value)}"


def _score(metric: Metric, value: float) -> str:
    return f"{100 * value:.1f}" if metric.percent else f"{value:.4g}"


def _amount(value: Interval | None) -> str:
    return _NOTHING if value is None else f"{value.mean:.3g}" if value.mean < 100 else f"{value.mean:.0f}"


def _p(p: float | None) -> str:
    if p is None:
        return _NOTHING
    return f"{p:.2g}{' *' if p < 0.05 else ''}"


def markdown(table: Table) -> str:
    """A table of Markdown; numbers to the right."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (table.columns, *table.rows)]
    rule = ["---", *(["---:"] * (len(table.columns) - 1))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (escaped[0], rule, *escaped[1:]))


def comma_separated(rows: Sequence[ComparedRow]) -> str:
    """The numbers as CSV, one line for each experiment; scores as in the records, intervals by their half widths."""
    text = io.StringIO()
    lines = [_numbers(row) for row in rows]
    out = csv.DictWriter(text, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    out.writeheader()
    out.writerows(lines)
    return text.getvalue()


def _numbers(row: ComparedRow) -> dict[str, object]:
    reached = row.reached or Reached(0, len(row.seeds))
    spread: dict[str, Interval | None] = {
        **row.scores,
        "difference": row.difference.by if row.difference else None,
        "megabytes": row.megabytes,
        "seconds": row.seconds,
        **({f"{name}_to_target": getattr(reached, name) for name in _TAKEN} if row.reached else {}),
    }
    numbers = {
        key: value
        for name, found in spread.items()
        for key, value in ((name, found and found.mean), (f"{name}_half", found and found.half))
    }
    p = row.difference.p if row.difference else None
    arrived = {"seeds_at_target": reached.count} if row.reached else {}
    return {"experiment": row.label, "seeds": len(row.seeds), "rounds": row.rounds, **numbers, "p": p, **arrived}


def latex(table: Table) -> str:
    """A LaTeX tabular for the package booktabs."""

    def line(cells: Sequence[str]) -> str:
        shown = (cell.translate(_TEX).replace("±", r"$\pm$").replace("–", "--") for cell in cells)
        return f"{' & '.join(shown)} \\\\\n"

    body = "".join(line(row) for row in table.rows)
    head = f"\\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}\n\\toprule\n{line(table.columns)}\\midrule\n"
    return f"{head}{body}\\bottomrule\n\\end{{tabular}}\n"


_FORMATS = (".md", ".csv", ".tex")


def write_comparison(rows: Sequence[ComparedRow], metric: Metric, path: Path) -> None:
    """Write a comparison in the format of the file's name.

    Raises:
        ConfigError: the name ends in none of .md, .csv and .tex.
    """
    check_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = [table_of(rows, metric), *([target_table_of(rows)] if any(row.reached for row in rows) else [])]
    written = {".md": markdown, ".tex": latex}.get(path.suffix)
    text = "\n".join(map(written, tables)) if written else comma_separated(rows)
    path.write_text(text, encoding="utf-8")


def check_format(path: Path) -> None:
    """Check that a table can be written to a file of this name.

    Raises:
        ConfigError: the name ends in none of .md, .csv and .tex.
    """
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: a table is written as {', '.join(_FORMATS)}; give the file such a name")
