"""A comparison as a paper prints it: experiments in rows, settings in columns, the best of each in bold."""

from collections.abc import Sequence

from potluck.analysis.compare import ComparedRow
from potluck.analysis.export import TextTable, scored
from potluck.records import Measure, Metric

_SURE = 0.05
_NOTHING = "–"


def pivot_of(rows: Sequence[ComparedRow], metric: Metric, measure: Measure) -> TextTable:
    """One row for each name of an experiment, and one column for each block, such as a partition or a data set.

    The best mean of a column is bold; * stands for p below 0.05 of the paired test against the column's reference.

    Args:
        rows: of the comparison.
        metric: the primary one.
        measure: whose values stand in the cells.
    """
    blocks, names = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("block", "name"))
    cells = {(row.name, row.block): row for row in rows if row.scores.get(measure) is not None}
    best = {block: _best([row for (_, of), row in cells.items() if of == block], metric, measure) for block in blocks}
    lines = [(name, *(_cell(cells.get((name, block)), metric, measure) for block in blocks)) for name in names]
    bold = frozenset(
        (name, column)
        for name in names
        for column, block in enumerate(blocks, 1)
        if (row := cells.get((name, block))) and row is best[block]
    )
    unit = f"{metric.label} (%)" if metric.percent else metric.label
    return TextTable(("", *(block or unit for block in blocks)), tuple(lines), bold=bold)


def _best(rows: Sequence[ComparedRow], metric: Metric, measure: Measure) -> ComparedRow | None:
    """The row with the best mean; None where there is nothing to choose from."""
    found: ComparedRow | None = None
    for row in rows:
        value, leading = row.scores.get(measure), found and found.scores.get(measure)
        if value and metric.better(value.mean, leading.mean if leading else None):
            found = row
    return found if len(rows) > 1 else None


def _cell(row: ComparedRow | None, metric: Metric, measure: Measure) -> str:
    if row is None:
        return _NOTHING
    sure = row.difference is not None and row.difference.p is not None and row.difference.p < _SURE
    return f"{scored(metric, row.scores.get(measure))}{' *' if sure else ''}"
