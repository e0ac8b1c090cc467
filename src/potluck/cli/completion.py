"""What a shell completes: names and keys, read from the source, since importing it would take a second for torch."""

import ast
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import typer

from potluck.core.ground.discovery import module_names, plugins

_ROOT = Path(__file__).parents[1]
_Class = tuple[Path, ast.ClassDef]
_MANIFEST = "manifest.json"


def methods() -> list[str]:
    """Names of all methods."""
    return sorted({*module_names("potluck.methods"), *plugins("potluck.methods")})


def models() -> list[str]:
    """Names of Potluck's own models: the keys of each family's `VARIANTS`."""
    return sorted(name for path in _sources("models") for name in _variants(path))


def datasets() -> list[str]:
    """Names of all data sets."""
    return sorted({*module_names("potluck.data.datasets"), *plugins("potluck.datasets")})


def recipes() -> list[str]:
    """Names of all recipes."""
    return sorted(path.stem for path in _file("recipes").parent.joinpath("recipes").glob("*.toml"))


def partitions() -> list[str]:
    """Names of all partitions."""
    return sorted({*module_names("potluck.data.partition"), *plugins("potluck.partitions")})


def config_keys(method: str | None) -> list[str]:
    """Dotted keys of a configuration, with those of a method, by default FedIN's."""
    config = ("experiment", "settings", "schema")
    name = method if method in module_names("potluck.methods") else "fedin"
    found = {
        "federation": _class_named(["FederationConfig"], _file(*config)),
        "federation.partition": _class_named(["Dirichlet"], _file("data", "partition", "dirichlet")),
        "method": _method_in(_file("methods", name)),
        "run": _class_named(["RunConfig"], _file(*config)),
    }
    return [f"{table}.{key}" for table, cls in found.items() for key in (_keys(cls) if cls else ())]


def folders() -> list[str]:
    """Folders of runs, here and in `runs`."""
    places = [path for parent in (Path("."), Path("runs")) if parent.is_dir() for path in sorted(parent.iterdir())]
    return [str(path) for path in places if (path / _MANIFEST).is_file()]


def of_target(context: typer.Context, incomplete: str) -> list[str]:
    """For the first argument of `potluck run`: a method, a file, or a key."""
    return _matching([*methods(), *_files(incomplete, ".toml", ".py"), *_assignable(None)], incomplete)


def of_overrides(context: typer.Context, incomplete: str) -> list[str]:
    """For further arguments: keys, also those of the method that was named."""
    return _matching(_assignable(context.params.get("target")), incomplete)


def of_compared(context: typer.Context, incomplete: str) -> list[str]:
    """For `potluck compare`: methods, files, runs, keys."""
    return _matching(
        [*methods(), *folders(), *_files(incomplete, ".toml"), *_assignable(None)],
        incomplete,
    )


def of_recipes(context: typer.Context, incomplete: str) -> list[str]:
    """For `potluck reproduce`: recipes and files."""
    return _matching([*recipes(), *_files(incomplete, ".toml")], incomplete)


def of_kinds(context: typer.Context, incomplete: str) -> list[str]:
    """For `potluck list`."""
    return _matching(["methods", "models", "datasets", "partitions", "tasks", "devices"], incomplete)


def of_inspected(context: typer.Context, incomplete: str) -> list[str]:
    """For `potluck inspect`."""
    return _matching(["federation", *models()], incomplete)


def of_new(context: typer.Context, incomplete: str) -> list[str]:
    """For `potluck new`."""
    return _matching(["method", "model", "data", "partition", "metric"], incomplete)


def of_names(context: typer.Context, incomplete: str) -> list[str]:
    """For `potluck show`: whatever has a name, and runs."""
    named = [*methods(), *models(), *datasets(), *partitions(), "run", "federation"]
    return _matching([*named, *folders(), *_files(incomplete, ".py")], incomplete)


def of_models(context: typer.Context, incomplete: str) -> list[str]:
    """For a model's name."""
    return _matching(models(), incomplete)


def of_folders(context: typer.Context, incomplete: str) -> list[str]:
    """For the folder of a run."""
    return _matching(folders(), incomplete)


def _assignable(method: str | None) -> list[str]:
    return [f"{key}=" for key in config_keys(method)]


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str, *suffixes: str) -> list[str]:
    """Files with these endings, and folders, that the words begun may mean."""
    folder, start = os.path.split(incomplete)
    found: list[str] = []
    if os.path.isdir(folder or "."):
        for entry in sorted(os.scandir(folder or "."), key=lambda entry: entry.name):
            if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
                name = os.path.join(folder, entry.name)
                found += [f"{name}/"] if entry.is_dir() else [name] if name.endswith(suffixes) else []
    return found


def _sources(package: str) -> Iterator[Path]:
    yield from sorted(path for path in (_ROOT / package).glob("*.py") if not path.name.startswith("_"))


def _file(*place: str) -> Path:
    return _ROOT.joinpath(*place).with_suffix(".py")


@cache
def _read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _variants(path: Path) -> list[str]:
    """The keys of `VARIANTS`, of which only keys are computed, from literals of the same file."""
    known: dict[str, Any] = {"range": range}
    for node in _read(path).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        name, value = getattr(target, "id", ""), getattr(node, "value", None)
        if name == "VARIANTS" and value is not None:
            return list(_evaluated(_KeysAlone().visit(value), known))
        if name.startswith("_") and value is not None:
            with suppress(ValueError):  # no literal
                known[name] = ast.literal_eval(value)
    return []


class _KeysAlone(ast.NodeTransformer):
    """Dicts with None for every value."""

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        """A dict and those that it takes in."""
        pairs = zip(node.keys, node.values, strict=True)
        node.values = [self.visit(value) if key is None else ast.Constant(None) for key, value in pairs]
        return node

    def visit_DictComp(self, node: ast.DictComp) -> ast.DictComp:
        """A dict by comprehension."""
        node.value = ast.Constant(None)
        return node


def _evaluated(node: ast.expr, known: dict[str, Any]) -> dict[str, None]:
    tree = ast.fix_missing_locations(ast.Expression(node))
    return eval(compile(tree, "VARIANTS", "eval"), {"__builtins__": {}, **known})


def _method_in(path: Path) -> _Class | None:
    """The class of a method's file that derives from `Method`."""
    classes = [(path, node) for node in _read(path).body if isinstance(node, ast.ClassDef)]
    return next((cls for cls in classes if any(base.name == "Method" for _, base in _ancestors(cls))), None)


def _keys(cls: _Class) -> list[str]:
    """The keys of a dataclass, those of nested dataclasses in place of the field that holds them."""
    found: list[str] = []
    for path, owner in reversed([cls, *_ancestors(cls)]):
        for node in owner.body if _is_dataclass(owner) else ():
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found += _of_field(node.target.id, node.annotation, path)
    return list(dict.fromkeys(found))


def _of_field(name: str, annotation: ast.expr, path: Path) -> list[str]:
    words = list(_words(annotation))
    if ["ClassVar"] in words:
        return []
    named = [] if ["tuple"] in words else words  # what is in a list of tables has no dotted key
    classes = [cls for word in named if (cls := _class_named(word, path)) and _is_dataclass(cls[1])]
    own = [] if classes and isinstance(annotation, ast.Name | ast.Attribute) else [name]
    return own + [f"{name}.{key}" for cls in classes for key in _keys(cls)]


def _ancestors(cls: _Class) -> list[_Class]:
    """The classes of Potluck's that a class derives from, nearest first."""
    path, node = cls
    found: list[_Class] = []
    for base in node.bases:
        name = next(_words(base.value if isinstance(base, ast.Subscript) else base))
        if parent := _class_named(name, path):
            found += [parent, *_ancestors(parent)]
    return found


def _words(node: ast.AST) -> Iterator[list[str]]:
    """The names in an expression, each in its parts: `fl.exits.Link` as fl, exits and Link."""
    dotted = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    if dotted:
        yield dotted.split(".")
    else:
        for inner in ast.iter_child_nodes(node):
            yield from _words(inner)


def _class_named(name: list[str], path: Path) -> _Class | None:
    """The class that a name means in a file, which may import it, or a module that has it, from another of Potluck's.

    Args:
        name: in its parts.
        path: the file.
    """
    first = name[0] if name else ""
    for node in _read(path).body:
        if isinstance(node, ast.ClassDef) and [node.name] == name:
            return path, node
        if isinstance(node, ast.Assign) and name in [[getattr(target, "id", "")] for target in node.targets]:
            return next((cls for word in _words(node.value) if (cls := _class_named(word, path))), None)
        if isinstance(node, ast.ImportFrom) and first in [alias.asname or alias.name for alias in node.names]:
            top, *places = (node.module or "").split(".")
            module = _file(*places, first)
            if top == "potluck" and module.is_file():
                return _class_named(name[1:], module)
            home = _file(*places)
            return _class_named(name, home) if top == "potluck" and home.is_file() else None
    return None


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list)
