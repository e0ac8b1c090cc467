"""An overview of a served run as a page without scripts, which asks for nothing but itself."""

import base64
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from jinja2 import Template
from markupsafe import Markup

from potluck.analysis.rendering import escaping
from potluck.cli.status.overview import Overview
from potluck.cli.terminal import megabytes
from potluck.records import duration

REFRESH = 5
"""Seconds after which a browser asks for the page again."""

_NOTHING = "–"
_GIGABYTE = 10**9


def page_of(seen: Overview) -> bytes:
    """The page. Whatever is put into it is escaped: names and reasons are what others made them."""
    return _template().render(seen=seen, now=seen.progress, style=Markup(_style()), refresh=REFRESH).encode()


def policy_of_page() -> str:
    """The page's Content-Security-Policy: its own style, and nothing else whatsoever."""
    style = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode("ascii")
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )


@cache
def _style() -> str:
    """The style of the report, and what is this page's alone."""
    report = files("potluck.analysis").joinpath("templates", "page.css").read_text(encoding="utf-8")
    own = files("potluck.cli.status").joinpath("templates", "status.css").read_text(encoding="utf-8")
    return report + own


@cache
def _template() -> Template:
    environment = escaping("potluck.cli.status")
    filters: dict[str, Callable[..., str]] = {"moment": _moment, "ago": _ago, "bytes": _bytes, "day": _day}
    environment.filters.update(filters)
    return environment.get_template("status.html.j2")


def _moment(at: float | None) -> str:
    """A moment, in UTC."""
    return _NOTHING if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"


def _ago(at: float | None, now: float) -> str:
    """How long ago a moment was."""
    return _NOTHING if at is None else duration(max(0.0, now - at))


def _day(end: datetime, now: float) -> str:
    """A day, and in how many days it comes."""
    left = (end - datetime.fromtimestamp(now, UTC)).days
    return f"{end:%Y-%m-%d}, {f'in {left} days' if left >= 0 else 'over'}"


def _bytes(count: int | None) -> str:
    if count is None:
        return _NOTHING
    return megabytes(count) if count < _GIGABYTE else f"{count / _GIGABYTE:.1f} GB"
