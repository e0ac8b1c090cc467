"""What may import what, read from the source, so that the arrows between packages point one way."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import potluck

ROOT = Path(next(iter(potluck.__path__)))
STDLIB = sys.stdlib_module_names


def files(*parts):
    """The Python files at or below a place in the package."""
    place = ROOT.joinpath(*parts)
    return [place] if place.suffix == ".py" else sorted(place.rglob("*.py"))


@cache
def imports(path):
    """Every import of a file, also inside functions, as (line, dotted name)."""
    return list(_imports(path))


def _imports(path):
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


def broken(paths, holds, rule):
    """The imports that break a rule, one line each; `holds` says of a dotted name whether it is in order."""
    found = [(path, line, name) for path in paths for line, name in imports(path) if not holds(name)]
    return [f"{path.relative_to(ROOT)}:{line} imports {name}; {rule}" for path, line, name in found]


def only(paths, *packages):
    """Of Potluck, the files import nothing but these packages."""
    named = [f"potluck.{package}" for package in packages]
    assert not broken(paths, lambda name: not within(name, "potluck") or within(name, *named), f"expected {packages}")


def none_of(paths, *packages):
    """The files import none of these packages."""
    assert not broken(paths, lambda name: not within(name, *packages), "it may not")


def nothing_else(paths, *packages):
    """Beside the standard library, the files import nothing but these packages."""
    assert not broken(paths, lambda name: within(name, *STDLIB, *packages), f"expected {packages} or Python's own")


def test_core_imports_the_standard_library_torch_safetensors_and_itself():
    nothing_else(files("core"), "torch", "safetensors", "potluck.core")


def test_parts_import_core_and_the_contract_the_split_the_fitting_and_the_stages_of_models():
    models = (f"potluck.models.{name}" for name in ("contract", "fitting", "split", "stages"))
    nothing_else(files("parts"), "torch", "numpy", "potluck.core", "potluck.parts", *models)


def test_a_method_imports_the_words_of_methods_alone():
    nothing_else(files("methods"), "torch", "potluck")
    written = [path for path in files("methods") if path.name != "__init__.py"]
    assert not broken(
        written,
        lambda name: name == "potluck.fl" or within(name, "potluck.methods") or not within(name, "potluck"),
        "expected `from potluck import fl`",
    )


def test_the_words_of_methods_are_of_core_of_parts_and_of_the_contract_the_split_and_the_stages_of_models():
    models = ("potluck.models.contract", "potluck.models.split", "potluck.models.stages")
    nothing_else(files("fl.py"), "potluck.core", "potluck.parts", *models)
    below = [path for name in ("core", "parts", "models", "engine", "data") for path in files(name)]
    none_of(below, "potluck.fl")


def test_methods_do_not_log_know_paths_or_parse_arguments():
    none_of(files("methods"), "logging", "argparse")
    none_of([path for path in files("methods") if path.name != "__init__.py"], "pathlib")


def test_a_method_builds_on_another_one_level_deep():
    for path in files("methods"):
        for line, name in imports(path):
            if within(name, "potluck.methods"):
                parent = path.with_name(name.split(".")[2] + ".py")
                assert parent.is_file(), f"{path}:{line} imports {name}; name the module of the other method"
                none_of([parent], "potluck.methods")


def test_models_import_core_and_themselves():
    only(files("models"), "core", "models")
    none_of(files("models"), "numpy")


def test_data_imports_core_and_itself():
    only(files("data"), "core", "data")


def test_the_engine_imports_core_and_itself():
    only(files("engine"), "core", "engine")


def test_records_import_core_and_analysis_reads_records_through_their_seals_and_sums_up_virtual_time():
    only(files("records.py"), "core")
    only(files("seals.py"), "core", "records")
    only(files("locks.py"), "core.ground.errors")
    read = ("core.ground.digest", "core.ground.errors", "records", "seals")
    only(files("analysis"), "analysis", *read, "twin.simulate", "twin.timeline")
    none_of(files("twin"), "potluck.analysis")


def test_attacks_import_what_they_attack_and_nothing_but_scripts_imports_them():
    only(files("attacks"), "attacks", "core", "engine", "models", "parts")
    none_of([path for path in files() if path.relative_to(ROOT).parts[0] not in ("attacks", "api")], "potluck.attacks")


def test_liars_are_made_of_core_and_the_engine_and_only_runs_have_them():
    only(files("attackers"), "attackers", "core", "engine")
    others = [path for path in files() if path.relative_to(ROOT).parts[0] not in ("attackers", "experiment")]
    none_of(others, "potluck.attackers")


def test_secure_sums_are_made_of_core_and_cryptography_and_only_runs_and_what_tries_them_import_them():
    nothing_else(files("secure"), "torch", "numpy", "cryptography", "potluck.core", "potluck.secure")
    using = ("secure", "testing", "experiment", "flower")
    none_of([path for path in files() if path.relative_to(ROOT).parts[0] not in using], "potluck.secure")


def test_a_run_without_secure_sums_needs_no_cryptography():
    with_it = [path for path in files("experiment") if path.name not in ("secure.py", "secure_sums.py", "run.py")]
    none_of(with_it, "potluck.secure")
    only(files("experiment", "settings", "secure.py"), "core.ground.fields", "secure.fixed")
    none_of(files("secure", "fixed.py"), "cryptography")


def test_experiment_imports_neither_the_command_line_nor_analysis_nor_testing():
    none_of(files("experiment"), "potluck.cli", "potluck.analysis", "potluck.testing", "potluck.flower")


def test_recipes_read_results_and_nothing_but_the_command_line_imports_them():
    none_of(files("recipes"), *(f"potluck.{name}" for name in ("api", "cli", "engine", "flower", "parts", "testing")))
    none_of([path for path in files() if path.relative_to(ROOT).parts[0] not in ("cli", "recipes")], "potluck.recipes")


def test_testing_imports_what_it_tests():
    below = ("core", "parts", "engine", "methods", "models", "experiment", "records", "secure", "twin")
    only(files("testing"), "testing", *below)


def test_nothing_below_the_command_line_imports_it():
    none_of([path for path in files() if path.relative_to(ROOT).parts[0] not in ("cli", "__main__.py")], "potluck.cli")


def test_nothing_below_the_command_line_imports_what_scripts_and_notebooks_use():
    above = ("cli", "api", "__init__.py", "__main__.py")
    none_of([path for path in files() if path.relative_to(ROOT).parts[0] not in above], "potluck.api")
    none_of(files("api"), "potluck.cli", "potluck.flower", "potluck.testing")


def test_heavy_libraries_stay_where_they_are_used():
    none_of([path for path in files() if not path.is_relative_to(ROOT / "data" / "datasets")], "datasets")
    none_of([path for path in files() if path.name != "ray.py"], "ray")
    none_of([path for path in files() if not path.is_relative_to(ROOT / "analysis" / "plots")], "matplotlib")
    none_of([path for path in files() if path.relative_to(ROOT).parts[0] != "api"], "onnxruntime", "IPython")


def test_a_tracker_is_imported_by_its_own_file_alone():
    names = ("tensorboard", "mlflow", "wandb", "trackio")
    libraries = [*names, *(f"potluck.experiment.watching.trackers.{name}" for name in names)]
    used = {(path, name) for path in files() for _, name in imports(path)}
    found = {(path, library) for path, name in used for library in libraries if within(name, library)}
    assert found == {(ROOT / "experiment" / "watching" / "trackers" / f"{name}.py", name) for name in names}


def test_watching_a_run_needs_no_torch():
    only(files("cli", "watch.py"), "cli.terminal", "core.ground.errors", "locks", "records", "seals")
    only(files("cli", "terminal.py"), "records")
    only(files("cli", "stages.py"))


def test_matplotlib_is_imported_inside_the_function_that_draws():
    for path in files("analysis", "plots"):
        inside = {
            node.lineno
            for function in ast.walk(ast.parse(path.read_text()))
            if isinstance(function, ast.FunctionDef)
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
        }
        outside = [line for line, name in imports(path) if within(name, "matplotlib") and line not in inside]
        assert not outside, f"{path}: lines {outside}"


def test_flower_stays_in_its_package_and_in_its_stand_in():
    outside = [path for path in files() if path.relative_to(ROOT).parts[0] != "flower"]
    none_of([path for path in outside if path.name != "loopback.py"], "flwr")
    none_of([path for path in outside if path.relative_to(ROOT).parts[0] != "cli"], "potluck.flower")


def test_what_carries_runs_across_machines_imports_neither_the_command_line_nor_analysis():
    none_of(files("flower"), "potluck.cli", "potluck.analysis", "potluck.testing")


def test_no_file_imports_a_format_that_runs_code():
    """But for what a process sends to one that it has just started itself."""
    others = [path for path in files() if path != ROOT / "engine" / "executors" / "anew.py"]
    none_of(others, "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")


def test_no_two_modules_import_each_other():
    """Nor do longer circles exist, in any package; what is imported inside a function counts."""
    modules = {".".join(("potluck", *path.relative_to(ROOT).with_suffix("").parts)): path for path in files()}
    names = {name.removesuffix(".__init__"): path for name, path in modules.items()}

    def module_of(name):
        while name not in names and "." in name:
            name = name.rpartition(".")[0]
        return name

    graph = {
        name: {module_of(found) for _, found in imports(path) if within(found, "potluck")} - {name, "potluck"}
        for name, path in names.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError and names the circle


def test_the_rules_notice_what_breaks_them(tmp_path):
    file = ROOT / "core" / "ground" / "tree.py"
    for rule in (lambda: none_of([file], "torch"), lambda: nothing_else([file]), lambda: only([file], "data")):
        with pytest.raises(AssertionError, match=r"core/ground/tree\.py:\d+ imports"):
            rule()


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import potluck", id="potluck"),
        pytest.param("import potluck.cli", id="cli"),
        pytest.param("from potluck.cli.commands import app; app(['--help'], standalone_mode=False)", id="help"),
    ],
)
def test_starting_is_light(code):
    numeric = ("torch", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "PIL")
    heavy = (*numeric, "datasets", "flwr", "ray", "pydantic", "jinja2", "importlib.metadata")
    code = f"import sys\n{code}\nprint('loaded:', *(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]
