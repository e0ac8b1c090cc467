"""The architecture in numbers: who imports whom, how long methods are, and names that mean two things.

    python benchmarks/house.py

A room is a file or a folder of a package, and an arrow goes from a room to another whose code it imports, also inside
functions. Rooms that import one another in a circle have an arrow that points up.
"""

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "potluck"
INNER = ("core", "engine", "experiment", "flower")
LIMIT = 110  # lines of a method without its docstring

Arrow = tuple[str, str]

WHY = {
    "RULES": "the operations that a file of the tracer knows; the tracer joins them",
    "TRACKER": "what every tracker's file is asked for",
    "VARIANTS": "a family's members, which every file of models with several has",
    "describe": "what every data set's file is asked for",
    "load": "what every data set's file is asked for; and of weights into a network",
    "log": "a file's logger",
    "main": "where a program starts: the command line, and what stands for Flower's program at a node",
    "resume": "a command; and a forward pass from a later stage on",
    "serve": "a command, and what it calls",
    **dict.fromkeys(("compare", "export", "report", "run"), "a command, its function in Python, and what both call"),
}
"""Why a public name may be defined in more than one module."""


def module_of(path: Path) -> tuple[str, ...]:
    """A file's place below the package: ("core", "rng"); a package's own file is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(path: Path, known: set[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The modules of Potluck that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "potluck":
                yield tuple(rest) if tuple(rest) in known else tuple(rest[:-1])


def arrows(below: tuple[str, ...] = ()) -> Counter[Arrow]:
    """How many imports each arrow between the rooms of a package stands for."""
    paths = sorted(ROOT.joinpath(*below).rglob("*.py"))
    known, depth, found = {module_of(path) for path in ROOT.rglob("*.py")}, len(below), Counter[Arrow]()
    for path in paths:
        mine = module_of(path)
        for theirs in imported(path, known):
            if theirs[:depth] == below and len(mine) > depth and len(theirs) > depth and mine[depth] != theirs[depth]:
                found[mine[depth], theirs[depth]] += 1
    return found


def circles(found: Iterable[Arrow]) -> list[list[str]]:
    """The sets of rooms that reach one another."""
    following: Mapping[str, set[str]] = defaultdict(set)
    for one, other in found:
        following[one].add(other)

    def reached(start: str) -> set[str]:
        seen, ahead = set[str](), [start]
        while ahead:
            for room in following.get(ahead.pop(), set()) - seen:
                seen.add(room)
                ahead.append(room)
        return seen

    reach = {room: reached(room) for room in sorted(following)}
    groups = {tuple(sorted(other for other in reach[room] if room in reach.get(other, ()))) for room in reach}
    return [list(group) for group in sorted(groups) if group]


def definitions() -> dict[str, list[str]]:
    """The modules that define each public class, function or constant, methods and templates aside."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        where = module_of(path)
        if where[:1] in (("methods",), ("recipes",)) or "templates" in where:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef) else []
            if isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for name in {name for name in names if not name.startswith("_") and len(name) > 1}:
                found[name].append(".".join(where))
    return found


def lengths() -> tuple[dict[str, int], list[int]]:
    """Each method's lines without its docstring, imports included, and how many of these are imports."""
    lines: dict[str, int] = {}
    imports: list[int] = []
    for path in sorted((ROOT / "methods").glob("[a-z]*.py")):
        tree = ast.parse(path.read_text())
        docstring = tree.body[0]
        lines[path.stem] = len(path.read_text().splitlines()) - (docstring.end_lineno or 0)
        imports.append(sum(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body))
    return lines, imports


def main() -> None:
    """Print all of it."""
    for below in ((), *((name,) for name in INNER)):
        found = arrows(below)
        rooms = {room for arrow in found for room in arrow}
        print(f"{'.'.join(['potluck', *below])}: {len(rooms)} rooms, {len(found)} arrows")
        for circle in circles(found):
            print(f"    in a circle: {', '.join(circle)}")
    lines, imports = lengths()
    print(f"methods: {len(lines)}, {sum(lines.values()):,} lines without docstrings")
    print(f"    median {statistics.median(lines.values()):g} lines, of them {statistics.median(imports):g} imports")
    long = sorted(((count, name) for name, count in lines.items() if count > LIMIT), reverse=True)
    print(f"    above {LIMIT}: {', '.join(f'{name} {count}' for count, name in long)}")
    whole = sum(len(path.read_text().splitlines()) for path in ROOT.rglob("*.py"))
    print(f"src: {whole:,} lines, methods/ {sum(len(p.read_text().splitlines()) for p in ROOT.glob('methods/*.py')):,}")
    twice = {name: places for name, places in definitions().items() if len(places) > 1}
    print(f"public names defined in more than one module: {len(twice)}")
    for name, places in sorted(twice.items()):
        print(f"    {name}, {WHY.get(name, 'nobody knows why')}: {', '.join(places)}")


if __name__ == "__main__":
    main()
