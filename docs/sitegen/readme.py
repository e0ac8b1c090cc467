"""The README's table of methods, by family: `PYTHONPATH=docs python -m sitegen.readme` writes it anew."""

import re
from pathlib import Path

from potluck.core.families import FAMILIES
from potluck.methods import get_method
from sitegen.methods import own_methods
from sitegen.text import code, table

README = Path(__file__).parents[2] / "README.md"


def families() -> str:
    """A row for each family: what its methods have in common, and their names."""
    named = {word: [name for name in own_methods() if get_method(name).family == word] for word in FAMILIES}
    rows = (
        (f"**{FAMILIES[word].title}.** {FAMILIES[word].intro}", ", ".join(map(code, names)))
        for word, names in named.items()
        if names
    )
    return table(("family", "methods"), rows)


def with_families(text: str) -> str:
    """The README with its table as it should be."""
    return re.sub(r"^\| family \| methods \|\n(\|.*\n)*", lambda _: f"{families().strip()}\n", text, flags=re.MULTILINE)


if __name__ == "__main__":
    README.write_text(with_families(README.read_text()))
