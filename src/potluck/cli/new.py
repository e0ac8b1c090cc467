"""`potluck new`: a part of your own and its test, both working, as a start."""

import importlib.util
import keyword
import sys
from importlib.resources import files
from pathlib import Path

import typer

from potluck.cli import completion
from potluck.core.ground.errors import ConfigError, nearest

NEXT = {
    "method": ("potluck check {name}.py", "potluck run {name}.py"),
    "model": ("potluck check {name}.py:{name}", "potluck run fedavg federation.models={name}.py:{name}"),
    "data": ("potluck check {name}.py:{name}", "potluck run fedavg federation.dataset={name}.py:{name}"),
    "partition": ("potluck check {name}.py:{name}", "potluck run fedavg federation.partition={name}.py:{name}"),
    "metric": ("potluck check {name}.py:{name}", "potluck run fedavg federation.metrics={name}.py:{name}"),
}
"""What can be made, and the commands that try it."""


def write_new(kind: str, name: str) -> None:
    """Write NAME.py and test_NAME.py to the current folder, and print what to type next.

    Raises:
        ConfigError: there is no such kind, the name cannot be a module's, or a file is there already.
    """
    if kind not in NEXT:
        raise ConfigError(f"new {kind}: expected one of {', '.join(NEXT)}; nearest: {nearest(kind, NEXT, 1)[0]}")
    _check_name(kind, name)
    places = [Path(f"{name}.py"), Path(f"test_{name}.py")]
    if found := [str(place) for place in places if place.exists() or place.is_symlink()]:
        raise ConfigError(f"{found[0]} is there already, and nothing is overwritten; choose another name")
    for place, template in zip(places, (f"{kind}.py", f"test_{kind}.py"), strict=True):
        text = (files("potluck.cli") / "templates" / template).read_text(encoding="utf-8")
        with place.open("x", encoding="utf-8") as file:
            file.write(_named(text, name))
    typer.echo(f"wrote {places[0]} and {places[1]}; change what you like, then")
    lacking = "" if importlib.util.find_spec("pytest") else "pip install pytest && "
    for command in (f"{lacking}python -m pytest {places[1]}", *NEXT[kind]):
        typer.echo(f"  {command.format(name=name)}")


def _check_name(kind: str, name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name.startswith("_"):
        raise ConfigError(f"new {kind} {name}: expected a name of small letters, digits and _, such as my_{kind}")
    known = {"method": completion.methods, "model": completion.models, "partition": completion.partitions}
    if kind in known and name in known[kind]():
        raise ConfigError(f"new {kind} {name}: Potluck has a {kind} of this name; choose another")
    own = Path(f"{name}.py").exists()  # which is refused for that reason
    if name in sys.stdlib_module_names or (not own and importlib.util.find_spec(name) is not None):
        raise ConfigError(
            f"new {kind} {name}: a Python module has this name, which the file would hide; choose another"
        )


def _named(text: str, name: str) -> str:
    """A template with the names of one part, its import blocks in order still."""
    title = "".join(word.capitalize() for word in name.split("_"))
    return text.replace("template_name", name).replace("TemplateName", title)
