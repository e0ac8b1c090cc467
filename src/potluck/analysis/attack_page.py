"""What an attack found, as one page of HTML, and its tables and pictures as files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup
from numpy.typing import NDArray

from potluck.analysis.export import TextTable
from potluck.analysis.findings_page import Shown
from potluck.analysis.findings_tables import Numbers, as_csv
from potluck.analysis.plots.images import draw_images
from potluck.analysis.plots.panels import save_figure
from potluck.analysis.rendering import NOTHING, svg_address, template
from potluck.records import Metric

ATTACK_PAGE, ATTACK_FILES = "attack.html", "attack"

_TITLES = {
    "audit": (
        "Private releases",
        "The accountant's epsilon for one release, and what an attack has shown it to be at least.",
    ),
    "inversion": (
        "Inversion of features",
        "Images that the network sees as it saw the client's: SSIM of 1 is the image itself. Blind is the mean image of"
        " the client, for comparison.",
    ),
    "labels": (
        "Label inference",
        "F1 of the classes that are taken for present, and of taking all; correlation of shares; distance: total"
        " variation to the true shares, and of equal shares.",
    ),
    "membership": (
        "Membership inference",
        "Area under the curve of the loss, of training examples against the client's own test part: 0.5 tells nothing.",
    ),
}


@dataclass(frozen=True)
class Attacked:
    """What an attack on a run found, as plain data.

    Attributes:
        title: names the run.
        round: that was listened to.
        metric: the run's.
        sentences: one for each attack that could be carried out.
        remarks: what could not, and why.
        tables: the numbers by the attack's name.
        images: rows of images by name: the clients', and what was made of their features.
    """

    title: str
    round: int
    metric: Metric
    sentences: Sequence[str] = ()
    remarks: Sequence[str] = ()
    tables: Mapping[str, Numbers] = field(default_factory=dict[str, Numbers])
    images: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


def write_attacked(found: Attacked, to: Path) -> Path:
    """Write `attack.html` into a folder, and all tables and pictures into its `attack/`.

    Returns:
        The path of the page.
    """
    place = to / ATTACK_FILES
    place.mkdir(parents=True, exist_ok=True)
    for name, rows in found.tables.items():
        (place / f"{name}.csv").write_text(as_csv(rows), encoding="utf-8")
    drawn = ""
    if found.images:
        save_figure(draw_images(found.images), place, "inversion")
        drawn = svg_address((place / "inversion.svg").read_bytes())
    style = files("potluck.analysis").joinpath("templates", "page.css").read_text(encoding="utf-8")
    text = template("attack.html.j2", found.metric).render(
        style=Markup(style),
        title=found.title,
        round=found.round,
        sentences=found.sentences,
        remarks=found.remarks,
        shown=[_shown(name, rows, drawn if name == "inversion" else "") for name, rows in found.tables.items()],
        files=ATTACK_FILES,
        names=[f"{name}.csv" for name in found.tables] + (["inversion.svg", "inversion.pdf"] if found.images else []),
    )
    (to / ATTACK_PAGE).write_text(text, encoding="utf-8")
    return to / ATTACK_PAGE


def _shown(name: str, rows: Numbers, picture: str) -> Shown:
    title, words = _TITLES[name]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = tuple(tuple(_cell(row.get(column)) for column in columns) for row in rows)
    figures = ((name, picture),) if picture else ()
    return Shown(title, TextTable(tuple(column.replace("_", " ") for column in columns), cells), figures, words)


def _cell(value: object) -> str:
    if value is None:
        return NOTHING
    return f"{value:.3f}" if isinstance(value, float) else str(value)
