"""Why an option may change nothing on the toy federation, or two runs differ that otherwise come to the same."""

from fnmatch import fnmatchcase

REASONS: dict[str, str] = {}
"""By method and option, as patterns: a sentence."""


def reason_for(method: str, option: str) -> str | None:
    """The reason for an option; that for a method alone before that for all."""
    return next((reason for pattern, reason in REASONS.items() if fnmatchcase(f"{method}: {option}", pattern)), None)
