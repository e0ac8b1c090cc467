"""The tables of an analysis as its page and papers show them: experiments over their seeds, with words for numbers."""

from collections.abc import Iterable, Sequence

from potluck.analysis.compare import Interval, interval
from potluck.analysis.export import TextTable, amount_of, table_of
from potluck.analysis.findings import Findings, points
from potluck.analysis.inside import Calibrated, Inside, MemberKind, by_experiment
from potluck.analysis.pivot import pivot_of
from potluck.analysis.rendering import NOTHING, score


def table_of_gains(found: Findings) -> TextTable:
    """Experiments beside training alone."""
    unit = " (points)" if found.metric.percent else ""
    columns = ("", "seeds", "clients", "profit", "lose", f"gain{unit}", "± over seeds", "± over clients", "p")
    lines: list[tuple[str, ...]] = []
    for gain in found.gains:
        counts = [
            f"{len(members)}{f' ({sure})' if (sure := sum(one.sure for one in members)) else ''}"
            for members in (gain.profiting, gain.losing)
        ]
        halves = [_plain(found, half.half) for half in (gain.over_seeds, gain.over_clients)]
        mean = points(found.metric, gain.over_seeds.mean).removesuffix(" points")
        sizes = str(gain.over_seeds.count), str(len(gain.clients))
        lines.append((gain.experiment, *sizes, *counts, mean, *halves, _p(gain.p)))
    return TextTable(columns, tuple(lines))


def table_of_clients(found: Findings) -> TextTable:
    """Clients by their gain."""
    lines = [
        (
            one.name,
            gain.experiment,
            one.architecture,
            _plain(found, one.alone),
            _plain(found, one.value),
            _signed(found, one.gain),
            _p(one.p),
        )
        for gain in found.gains
        for one in sorted(gain.clients, key=lambda one: one.gain.mean)
    ]
    return TextTable(("", "experiment", "architecture", "alone", "with it", "gain", "p"), tuple(lines))


def table_of_groups(found: Findings) -> TextTable:
    """Groups of test examples by their gain."""
    lines = [
        (
            row.group,
            row.experiment,
            f"{row.examples:.4g}",
            f"{100 * row.alone:.1f}",
            f"{100 * row.value:.1f}",
            _in_points(row.gain),
            _p(row.p),
        )
        for row in found.groups
    ]
    columns = ("", "experiment", "examples", "alone (%)", "with it (%)", "gain (points)", "p")
    return TextTable(columns, tuple(lines))


def table_of_architectures(found: Findings) -> TextTable:
    """The clients of each architecture."""
    lines = [
        (name, gain.experiment, _signed(found, over))
        for gain in found.gains
        for name, over in gain.by_architecture.items()
    ]
    return TextTable(("", "experiment", "gain"), tuple(lines))


def table_of_classes(found: Findings) -> TextTable:
    """One row for each class, and a column for each experiment."""
    numbers = sorted({number for gain in found.gains for number in gain.by_class})
    lines = [
        (found.class_name(number), *(_in_points(gain.by_class.get(number)) for gain in found.gains))
        for number in numbers
    ]
    return TextTable(("", *(gain.experiment for gain in found.gains)), tuple(lines))


def table_of_client_classes(found: Findings) -> dict[str, TextTable]:
    """By experiment one row for each client, and a column for each class."""
    tables: dict[str, TextTable] = {}
    for experiment in dict.fromkeys(row.experiment for row in found.classes):
        cells = {(row.name, row.label): row.gain for row in found.classes if row.experiment == experiment}
        labels = sorted({label for _, label in cells})
        lines = [
            (name, *(_in_points(cells.get((name, label))) for label in labels))
            for name in dict.fromkeys(name for name, _ in cells)
        ]
        tables[experiment] = TextTable(("", *map(found.class_name, labels)), tuple(lines))
    return tables


def table_of_fairness(found: Findings) -> TextTable:
    """How evenly the metric is spread."""
    lines = [
        (
            row.experiment,
            *(score(found.metric, value) for value in (row.mean, row.spread, row.worst, row.worst_tenth)),
            NOTHING if row.gini is None else f"{row.gini.mean:.3f}",
        )
        for row in found.fairness
    ]
    return TextTable(("", "mean", "spread", "worst", "worst tenth", "Gini"), tuple(lines))


def table_of_costs(found: Findings) -> TextTable:
    """Scores, megabytes and seconds."""
    return table_of(found.rows, found.metric)


def table_of_target(found: Findings) -> TextTable:
    """What it took to reach the target."""
    rows = {row.label: row.reached for row in found.rows}
    against = dict.fromkeys(one.against for one in found.speeds if one.against)
    lines: list[tuple[str, ...]] = []
    for one in found.speeds:
        reached = rows[one.experiment]
        speedup = [NOTHING if one.speedup is None else f"{one.speedup.mean:.1f}"] if against else []
        spent = [amount_of(value) for value in (reached and reached.megabytes, reached and reached.seconds)]
        lines.append((one.experiment, f"{one.reached} of {one.seeds}", one.text, *speedup, *spent))
    return TextTable(("", "seeds", "rounds", *(["speed-up"] if against else []), "MB", "seconds"), tuple(lines))


def table_of_pivot(found: Findings) -> TextTable:
    """A row for each method, and a column for each setting."""
    return pivot_of(found.rows, found.metric, found.measure)


def table_of_similarity(found: Findings) -> TextTable:
    """CKA between clients by stage."""
    lines: list[tuple[str, ...]] = []
    for experiment, runs in by_experiment(found.inside):
        between = [one.between_clients() for one in runs]
        for stage in sorted({stage for of in between for stage in of}):
            exact, unbiased = zip(*(of[stage] for of in between if stage in of), strict=True)
            lines.append((experiment, str(stage), _mean(unbiased), _mean(exact)))
    return TextTable(("", "stage, from 0", "CKA, unbiased", "CKA, exact"), tuple(lines))


def table_of_separation(found: Findings) -> TextTable:
    """Silhouettes of features."""
    lines: list[tuple[str, ...]] = []
    for experiment, runs in by_experiment(found.inside):
        maps = [one.map for one in runs if one.map]
        if maps:
            values = [_mean(getattr(one, name) for one in maps) for name in ("by_client", "by_class")]
            lines.append((experiment, str(len(maps[0].clients)), str(maps[0].width), *values))
    return TextTable(("", "clients", "width", "by client", "by class"), tuple(lines))


def table_of_drift(found: Findings) -> TextTable:
    """One row for each layer, and a column for each experiment: the mean over clients."""
    experiments = [(name, runs) for name, runs in by_experiment(found.inside) if any(one.drift for one in runs)]
    layers = dict.fromkeys(row.layer for _, runs in experiments for one in runs for row in one.drift)

    def of(layer: str, runs: Sequence[Inside]) -> str:
        return _mean(row.mean for one in runs for row in one.drift if row.layer == layer)

    lines = [(layer, *(of(layer, runs) for _, runs in experiments)) for layer in layers]
    return TextTable(("", *(name for name, _ in experiments)), tuple(lines))


def table_of_calibration(found: Findings, *kinds: MemberKind) -> TextTable:
    """How sure predictions of these kinds are."""
    lines: list[tuple[str, ...]] = []
    for experiment, runs in by_experiment(found.inside):
        of: dict[str, list[Calibrated]] = {}
        for one in (one for run in runs for one in run.calibration if one.kind in kinds):
            of.setdefault(one.whose, []).append(one)
        lines += [(whose, experiment, *_calibrated(several)) for whose, several in of.items()]
    columns = ("", "experiment", "examples", "accuracy (%)", "confidence (%)", "ECE (%)", "Brier")
    return TextTable(columns, tuple(lines))


def _calibrated(several: Sequence[Calibrated]) -> list[str]:
    examples = sum(one.values.examples for one in several) / len(several)
    shares = [_mean((100 * getattr(one.values, name) for one in several), 1) for name in _SHARES]
    return [f"{examples:.4g}", *shares, _mean(one.values.brier for one in several)]


_SHARES = ("accuracy", "confidence", "ece")


def _mean(values: Iterable[float | None], decimals: int = 3) -> str:
    """Mean over seeds with half of its interval."""
    found = interval(values)
    if found is None:
        return NOTHING
    half = "" if found.half is None else f" ± {found.half:.{decimals}f}"
    return f"{found.mean:.{decimals}f}{half}"


def _in_points(share: Interval | None) -> str:
    if share is None:
        return NOTHING
    return f"{100 * share.mean:+.1f}" + ("" if share.half is None else f" ± {100 * share.half:.1f}")


def _plain(found: Findings, value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{100 * value:.1f}" if found.metric.percent else f"{value:.4g}"


def _signed(found: Findings, value: Interval) -> str:
    mean = points(found.metric, value.mean).removesuffix(" points")
    return mean if value.half is None else f"{mean} ± {_plain(found, value.half)}"


def _p(p: float | None) -> str:
    return NOTHING if p is None else f"{p:.2g}"
