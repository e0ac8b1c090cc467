"""The report's templates, and how they write values: the page and the plain text in the same way."""

import base64
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from potluck.analysis.compare import Interval
from potluck.analysis.embedded import page_value
from potluck.analysis.export import in_markdown
from potluck.analysis.groups import enumerated
from potluck.analysis.tables import Spread
from potluck.records import TITLES, TITLES_OF_A_CLIENT, Metric

NOTHING = "–"
"""Stands for what was not measured."""
Value = Interval | Spread | float | None


def escaping(package: str) -> Environment:
    """The templates of a package. What is put into them is escaped: names are what their users made them."""
    return Environment(
        loader=PackageLoader(package), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=True
    )


def template(name: str, metric: Metric) -> Template:
    """A template of the report; its filter `score` writes values of this metric.

    Markdown is escaped like pages, and keeps the line break at its end.
    """
    environment = escaping("potluck.analysis")
    if not name.endswith(".html.j2"):
        environment = environment.overlay(finalize=_escaped, keep_trailing_newline=True)
    words: dict[str, Any] = {"titles": TITLES, "of_a_client": TITLES_OF_A_CLIENT}
    environment.globals.update(words)
    filters: dict[str, Callable[..., str]] = {
        "score": partial(score, metric),
        "scored": _scored,
        "exact": _exact,
        "amount": amount,
        "number": _number,
        "enumerated": enumerated,
    }
    environment.filters.update(filters)
    return environment.get_template(name)


def svg_address(svg: bytes) -> str:
    """A picture as an address that holds it, so that a page asks for nothing over the network."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def score(metric: Metric, value: Value, std: float | None = None) -> str:
    """A value of a metric, with half of its interval or its standard deviation if it has one."""
    if value is None:
        return NOTHING
    if isinstance(value, float | int):
        mean, beside = value, std
    else:
        mean, beside = value.mean, value.half if isinstance(value, Interval) else value.std
    return " ± ".join(page_value(part, metric.percent) for part in (mean, beside) if part is not None)


def amount(value: Value) -> str:
    """A number of megabytes or seconds, with as many decimals as say something."""
    if value is None:
        return NOTHING
    mean = value if isinstance(value, float | int) else value.mean
    decimals = 2 - math.floor(math.log10(mean)) if mean > 0 else 0
    return f"{mean:,.{min(max(decimals, 0), 9)}f}"


def _scored(value: Value, metric: Metric) -> str:
    return score(metric, value)


def _exact(value: Value) -> str:
    """The number to sort by; empty if there is none."""
    if value is None:
        return ""
    return repr(value if isinstance(value, float | int) else value.mean)


def _number(value: float) -> str:
    """A number of any size with four significant digits."""
    return f"{value:.4g}"


def _escaped(value: object) -> Markup:
    """A value for Markdown; what a macro has put together is escaped already."""
    return value if isinstance(value, Markup) else Markup(in_markdown(str(value)))
