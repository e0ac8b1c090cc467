"""Makes `docs/_build/html`; a warning is an error."""

import fcntl
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from sitegen.assemble import linked_files, pages

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "docs" / "_build"


def build(root: Path = ROOT, place: Path = BUILD) -> int:
    """Write the pages and have Sphinx make the site; returns its exit code.

    A page that has not changed is not written again, so that Sphinx need not read it again.
    """
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        source = place / "source"
        contents = {path: text.encode() for path, text in pages(root).items()}
        contents |= {path: file.read_bytes() for path, file in linked_files(root).items()}
        update(source, contents)
        return run_sphinx(source, place / "html")


def update(folder: Path, contents: dict[str, bytes]) -> None:
    """Make a folder hold exactly these files."""
    for path, content in contents.items():
        file = folder / path
        if not file.is_file() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    for file in folder.rglob("*"):
        if file.is_file() and file.relative_to(folder).as_posix() not in contents:
            file.unlink()


def run_sphinx(source: Path, html: Path) -> int:
    """Sphinx on a folder of pages, strictly."""
    strict = ["--nitpicky", "--fail-on-warning", "--keep-going", "--quiet"]
    trees = html.with_name("trees")
    return sphinx([*strict, "-b", "html", "-c", str(Path(__file__).parent), "-d", str(trees), str(source), str(html)])


if __name__ == "__main__":
    code = build()
    if code == 0:
        print(BUILD / "html" / "index.html")  # noqa: T201
    sys.exit(code)
