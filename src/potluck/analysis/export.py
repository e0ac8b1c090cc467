"""A table as text: Markdown, CSV or LaTeX, chosen by the file's name."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.analysis.compare import ComparedRow, Interval, Reached
from potluck.core.ground.errors import ConfigError
from potluck.records import MAIN_MEASURES, TITLES, Measure, Metric

_NOTHING = "–"
_TEX = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})


@dataclass(frozen=True)
class TextTable:
    """Cells of text under headings; the first column names the row.

    Attributes:
        columns: the headings.
        rows: the cells.
        blocks: of each row the name of its block, whose rows are neighbours; empty if there is only one.
        bold: cells that stand out, by the name of their row and the number of their column.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    blocks: tuple[str, ...] = ()
    bold: frozenset[tuple[str, int]] = frozenset()

    @property
    def parts(self) -> list[tuple[str, tuple[tuple[str, ...], ...]]]:
        """The rows of each block under its name, which is empty if there is only one."""
        found: dict[str, list[tuple[str, ...]]] = {}
        for row, block in zip(self.rows, self.blocks or [""] * len(self.rows), strict=True):
            found.setdefault(block, []).append(row)
        return [(block, tuple(rows)) for block, rows in found.items()]


_TAKEN = ("rounds", "megabytes", "seconds")


def table_of(rows: Sequence[ComparedRow], metric: Metric) -> TextTable:
    """A comparison as cells: values with the half widths of their intervals; p below 0.05 has a star."""
    unit = " (%)" if metric.percent else ""
    measured: list[Measure] = [of for of in MAIN_MEASURES if any(row.scores[of] for row in rows)]
    compared, timed = any(row.difference for row in rows), any(row.seconds for row in rows)
    columns = ["", "seeds", *(f"{TITLES[of]}{unit}" for of in measured)]
    columns += [*(["difference", "p"] if compared else []), "MB", *(["seconds"] if timed else [])]
    lines: list[tuple[str, ...]] = []
    rows = _by_block(rows)
    for row in rows:
        cells = [row.name, str(len(row.seeds)), *(scored(metric, row.scores[of]) for of in measured)]
        if compared:
            cells += [_signed(metric, row.difference.by), _p(row.difference.p)] if row.difference else [_NOTHING] * 2
        lines.append((*cells, amount_of(row.megabytes), *([amount_of(row.seconds)] if timed else [])))
    return TextTable(tuple(columns), tuple(lines), _blocks(rows))


def _by_block(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """The rows with those of a block together, blocks in order of appearance."""
    order = list(dict.fromkeys(row.block for row in rows))
    return sorted(rows, key=lambda row: order.index(row.block))


def _blocks(rows: Sequence[ComparedRow]) -> tuple[str, ...]:
    return tuple(row.block for row in rows) if len({row.block for row in rows}) > 1 else ()


def target_table_of(rows: Sequence[ComparedRow]) -> TextTable:
    """What it took to reach the target, mean over the seeds that did."""
    lines: list[tuple[str, ...]] = []
    rows = _by_block(rows)
    for row in rows:
        reached = row.reached or Reached(0, len(row.seeds))
        rounds = _NOTHING if reached.rounds is None else f"{reached.rounds.mean:.4g}"
        arrived = f"{reached.count} of {reached.seeds}"
        lines.append((row.name, arrived, rounds, amount_of(reached.megabytes), amount_of(reached.seconds)))
    return TextTable(("", "seeds", "rounds", "MB", "seconds"), tuple(lines), _blocks(rows))


def caption(rows: Sequence[ComparedRow], measure: Measure) -> str:
    """What the numbers of a comparison by a measure are, in a sentence or two."""
    words = ["Means over clients"]
    if any(len(row.seeds) > 1 for row in rows):
        words = ["Means over clients and seeds ± half of the interval of 95 % confidence over seeds"]
    if references := list(dict.fromkeys(row.against for row in rows if row.difference and row.against)):
        where = " and block" if len({row.block for row in rows}) > 1 else ""
        words.append(f"difference from {' or '.join(references)} within a seed{where} ({TITLES[measure]})")
    if any(row.difference and row.difference.p is not None for row in rows):
        words.append("p of a paired t-test, adjusted by Holm's method; * below 0.05")
    return "; ".join(words) + "."


def scored(metric: Metric, value: Interval | None) -> str:
    """A value with the half width of its interval, of shares in percent."""
    if value is None:
        return _NOTHING
    half = "" if value.half is None else f" ± {_score(metric, value.half)}"
    return f"{_score(metric, value.mean)}{half}"


def _signed(metric: Metric, value: Interval) -> str:
    return f"{'+' if value.mean > 0 else ''}{scored(metric, value)}"


def _score(metric: Metric, value: float) -> str:
    return f"{100 * value:.1f}" if metric.percent else f"{value:.4g}"


def amount_of(value: Interval | None) -> str:
    """A number of megabytes or seconds."""
    return _NOTHING if value is None else f"{value.mean:.3g}" if value.mean < 100 else f"{value.mean:.0f}"


def _p(p: float | None) -> str:
    if p is None:
        return _NOTHING
    return f"{p:.2g}{' *' if p < 0.05 else ''}"


def markdown(table: TextTable) -> str:
    """A table of Markdown; numbers to the right."""
    rule = ["---", *(["---:"] * (len(table.columns) - 1))]
    lines = [_escaped(table.columns), rule]
    for block, rows in table.parts:
        lines += [[f"**{in_markdown(block)}**", *([""] * (len(table.columns) - 1))]] if block else []
        lines += map(_escaped, rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def in_markdown(text: str) -> str:
    """Text that stands for itself in Markdown, also in a cell of a table: neither HTML nor a link nor code."""
    words = re.sub(r"([\\`|\[\]])", r"\\\1", " ".join(text.splitlines()))
    return re.sub(r"&(?=[#\w])", "&amp;", words).replace("<", "&lt;")


def _escaped(cells: Sequence[str]) -> list[str]:
    return [in_markdown(cell) for cell in cells]


def comma_separated(rows: Sequence[ComparedRow]) -> str:
    """The numbers as CSV, one line for each experiment; scores as in the records, intervals by their half widths.

    Every line ends with the experiment's block, what that is compared with, and every setting by its dotted key.
    """
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
    counts = {"experiment": row.label, "seeds": len(row.seeds), "rounds": row.rounds}
    return {**counts, **numbers, "p": p, **arrived, "block": row.block, "against": row.against, **row.settings}


def latex(table: TextTable) -> str:
    """A LaTeX tabular for the package booktabs."""

    def line(cells: Sequence[str]) -> str:
        shown = [cell.translate(_TEX).replace("±", r"$\pm$").replace("–", "--") for cell in cells]
        weighed = (f"\\textbf{{{cell}}}" if (cells[0], at) in table.bold else cell for at, cell in enumerate(shown))
        return f"{' & '.join(weighed)} \\\\\n"

    def headed(block: str) -> str:
        return (
            f"\\multicolumn{{{len(table.columns)}}}{{l}}{{\\emph{{{block.translate(_TEX)}}}}} \\\\\n" if block else ""
        )

    body = "\\midrule\n".join(headed(block) + "".join(map(line, rows)) for block, rows in table.parts)
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
