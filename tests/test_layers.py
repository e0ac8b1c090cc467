"""What may import what, read from the source, so that the arrows between packages point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import potluck

ROOT = Path(next(iter(potluck.__path__)))
STDLIB = sys.stdlib_module_names


def files(*parts):
    """The Python files at or below a place in the package, as test parameters named by their path."""
    place = ROOT.joinpath(*parts)
    found = [place] if place.suffix == ".py" else sorted(place.rglob("*.py"))
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in found]


def imports(path):
    """Every import of a file, also inside functions, as (line, dotted name)."""
    package = ["potluck", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            yield from (
                (node.lineno, argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)
            )


def _name(function):
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def within(name, *packages):
    """Whether a dotted name is one of these packages or lies below one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def of_potluck(path):
    """The imports of a file that are Potluck's own."""
    return [(line, name) for line, name in imports(path) if within(name, "potluck")]


def must_hold(path, broken, rule):
    """Fail with the places that break a rule, one line each."""
    assert not broken, "\n".join(f"{path}:{line} imports {name}; {rule}" for line, name in broken)


def may_import_only(path, *packages):
    """Of Potluck, the file imports nothing but these packages."""
    broken = [(line, name) for line, name in of_potluck(path) if not within(name, *packages)]
    must_hold(path, broken, f"of Potluck it may import only {', '.join(packages)}")


def may_not_import(path, *packages):
    """The file imports none of these packages."""
    broken = [(line, name) for line, name in imports(path) if within(name, *packages)]
    must_hold(path, broken, f"it may not import {', '.join(packages)}")


@pytest.mark.parametrize("path", files("core"))
def test_core_imports_the_standard_library_torch_safetensors_and_itself(path):
    allowed = (*STDLIB, "torch", "safetensors", "potluck.core")
    broken = [(line, name) for line, name in imports(path) if not within(name, *allowed)]
    must_hold(path, broken, "core may import only the standard library, torch, safetensors and potluck.core")


SHARED = ("losses", "noise", "privacy", "classwise", "vae", "memory", "activations", "depthwise")
"""Modules that methods share, beside core and the contract of models; each may import those before it."""


@pytest.mark.parametrize("name", SHARED)
def test_what_methods_share_imports_core_and_what_stands_before_it(name):
    before = SHARED[: SHARED.index(name)]
    contract = ["potluck.models.contract"] if name in ("memory", "depthwise") else []
    may_import_only(ROOT / f"{name}.py", "potluck.core", *contract, *(f"potluck.{other}" for other in before))


@pytest.mark.parametrize("path", files("methods"))
def test_methods_import_core_losses_and_the_model_contract(path):
    may_import_only(path, *(f"potluck.{name}" for name in ("core", *SHARED, "models.contract", "methods")))


@pytest.mark.parametrize("path", files("methods"))
def test_methods_import_the_standard_library_and_torch(path):
    allowed = (*STDLIB, "torch", "potluck")
    broken = [(line, name) for line, name in imports(path) if not within(name, *allowed)]
    must_hold(path, broken, "of others a method may import only torch")


@pytest.mark.parametrize("path", files("methods"))
def test_methods_do_not_log_know_paths_or_parse_arguments(path):
    may_not_import(path, "logging", "argparse", *([] if path.name == "__init__.py" else ["pathlib"]))


@pytest.mark.parametrize("path", files("methods"))
def test_a_method_builds_on_another_one_level_deep(path):
    parents = [(line, name) for line, name in of_potluck(path) if within(name, "potluck.methods")]
    for line, name in parents:
        parent = path.with_name(name.split(".")[2] + ".py")
        assert parent.is_file(), f"{path}:{line} imports {name}; name the module of the other method"
        above = [(line, name) for line, name in of_potluck(parent) if within(name, "potluck.methods")]
        must_hold(parent, above, f"{path.name} builds on it already: one level, never more")


@pytest.mark.parametrize("path", files("models"))
def test_models_import_core_and_themselves(path):
    may_import_only(path, "potluck.core", "potluck.models")
    may_not_import(path, "numpy")


@pytest.mark.parametrize("path", files("data"))
def test_data_imports_core_and_itself(path):
    may_import_only(path, "potluck.core", "potluck.data")


@pytest.mark.parametrize("path", files("engine"))
def test_the_engine_imports_core_and_themselves(path):
    may_import_only(path, "potluck.core", "potluck.engine")


@pytest.mark.parametrize("path", files("analysis"))
def test_analysis_reads_records_and_nothing_else(path):
    may_import_only(path, "potluck.analysis", "potluck.core.digest", "potluck.core.errors", "potluck.records")


@pytest.mark.parametrize("path", files("experiment"))
def test_experiment_imports_neither_the_command_line_nor_analysis(path):
    may_not_import(path, "potluck.cli", "potluck.analysis")


@pytest.mark.parametrize("path", files("testing"))
def test_testing_imports_what_it_tests(path):
    allowed = ("core", "engine", "methods", "parts", "models", "experiment", "testing")
    may_import_only(path, *(f"potluck.{name}" for name in allowed))


@pytest.mark.parametrize("path", files())
def test_nothing_below_the_command_line_imports_it(path):
    if path.relative_to(ROOT).parts[0] not in ("cli", "cli.py", "__main__.py"):
        may_not_import(path, "potluck.cli")


@pytest.mark.parametrize("path", files())
def test_hugging_face_datasets_stay_inside_data(path):
    if not path.is_relative_to(ROOT / "data" / "datasets"):
        may_not_import(path, "datasets")


@pytest.mark.parametrize("path", files())
def test_matplotlib_stays_inside_functions_of_the_plots(path):
    if not path.is_relative_to(ROOT / "analysis" / "plots"):
        may_not_import(path, "matplotlib")
    inside = {
        node.lineno
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
    }
    outside = [(line, name) for line, name in imports(path) if within(name, "matplotlib") and line not in inside]
    must_hold(path, outside, "matplotlib is imported inside the function that draws")


@pytest.mark.parametrize("path", files())
def test_flower_stays_in_its_package_and_in_its_stand_in(path):
    place = path.relative_to(ROOT)
    if place.parts[0] != "flower" and place.name != "loopback.py":
        may_not_import(path, "flwr")
    if place.parts[0] not in ("flower", "cli"):
        may_not_import(path, "potluck.flower")


@pytest.mark.parametrize("path", files("flower"))
def test_what_carries_runs_across_machines_imports_neither_the_command_line_nor_analysis(path):
    may_not_import(path, "potluck.cli", "potluck.analysis", "potluck.testing")


@pytest.mark.parametrize("path", files())
def test_ray_stays_in_its_executor(path):
    if path.name != "ray.py":
        may_not_import(path, "ray")


@pytest.mark.parametrize("path", files())
def test_no_file_imports_a_format_that_runs_code(path):
    may_not_import(path, "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")


@pytest.mark.parametrize("module", ["potluck", "potluck.cli"])
def test_importing_it_is_light(module):
    code = (
        f"import sys, {module}\nprint(*(name for name in ('torch', 'matplotlib', 'datasets') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
