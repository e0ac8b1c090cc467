import sys

import pytest

from potluck.core.ground.discovery import load_file, matching, module_names, plugins, unknown
from potluck.core.ground.errors import ConfigError, nearest


def test_an_unknown_name_is_answered_with_the_nearest_and_the_command():
    error = unknown("method", "fedavgg", ["fedavg", "fedin", "scaffold"], "potluck list methods")
    assert isinstance(error, ConfigError)
    assert str(error) == "unknown method 'fedavgg'; nearest: fedavg, fedin; all: potluck list methods"


def test_the_nearest_come_best_first_and_never_more_than_asked():
    known = ["resnet8", "resnet10", "resnet18", "resnet14", "vgg11"]
    assert nearest("resnet1", known)[0] in ("resnet10", "resnet14", "resnet18")
    assert len(nearest("resnet1", known)) == 3
    assert nearest("resnet8", iter(known), count=1) == ["resnet8"]


def test_something_is_always_near():
    assert nearest("zzz", ["b", "a"]) == ["a", "b"]
    assert nearest("zzz", []) == []


def test_modules_are_listed_without_importing_them(tmp_path, monkeypatch):
    package = tmp_path / "listed_package"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("beta", "alpha", "_hidden"):
        (package / f"{name}.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    assert module_names("listed_package") == ["alpha", "beta"]
    (package / "gamma.py").touch()
    assert module_names("listed_package") == ["alpha", "beta", "gamma"]


def test_a_group_nobody_offers_is_empty():
    assert plugins("potluck.nothing") == {}


def test_patterns_are_those_of_the_shell():
    assert matching(["fedavg", "fedin", "scaffold"], "fed*") == ["fedavg", "fedin"]
    assert matching(["fedavg"], "FED*") == []


def test_a_file_outside_any_package_is_imported(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from dataclasses import dataclass\n@dataclass\nclass Mine:\n    x: 'int' = 3\n")
    assert load_file(path).Mine().x == 3


@pytest.mark.parametrize("name", ["missing.py", "folder.py"])
def test_a_file_that_is_not_there_is_named(tmp_path, name):
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError) as caught:
        load_file(tmp_path / name)
    assert str(caught.value) == f"{tmp_path / name}: no such file; expected a Python file"


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "method.toml"
    path.touch()
    with pytest.raises(ConfigError, match=r"method\.toml: .*expected a Python file"):
        load_file(path)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("\n1 / 0", r"ZeroDivisionError: division by zero; .*breaks\.py, line 2$"),
        ("import no_such_module", r"ModuleNotFoundError: No module named 'no_such_module'; .*breaks\.py, line 1$"),
        ("def x(:", r"SyntaxError: .*\(breaks\.py, line 1\)$"),
        ("raise SystemExit(0)", r"SystemExit: 0; .*breaks\.py, line 1$"),
    ],
)
def test_a_file_that_breaks_is_one_line_and_leaves_no_module(tmp_path, source, expected):
    path, before = tmp_path / "breaks.py", set(sys.modules)
    path.write_text(source)
    with pytest.raises(ConfigError, match=rf"breaks\.py: cannot be imported: {expected}") as caught:
        load_file(path)
    assert "\n" not in str(caught.value)
    assert set(sys.modules) == before


def write(folder, **sources):
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return folder


def test_a_file_imports_its_neighbours_and_leaves_the_path_as_it_was(tmp_path):
    write(tmp_path / "parts", __init__="", deep="VALUE = 7")
    write(tmp_path, mine="import layers\nfrom parts.deep import VALUE\n", layers="import more", more="")
    path, before = list(sys.path), set(sys.modules)
    module = load_file(tmp_path / "mine.py")
    assert (module.VALUE, module.layers.__name__) == (7, "layers")
    assert sys.path == path
    assert set(sys.modules) - before == {module.__name__}


def test_neighbours_of_one_name_are_each_their_own_files(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / name, mine="from neighbour import NAME", neighbour=f"NAME = {name!r}")
    assert [load_file(tmp_path / name / "mine.py").NAME for name in ("one", "two")] == ["one", "two"]


def test_a_neighbour_called_like_a_library_does_not_become_the_library(tmp_path):
    write(tmp_path, mine="import wave\nFOUND = wave.__file__", wave="")
    sys.modules.pop("wave", None)
    assert str(tmp_path / "wave.py") == load_file(tmp_path / "mine.py").FOUND
    import wave

    assert hasattr(wave, "open")


def test_what_a_file_imports_of_an_installed_package_stays(tmp_path, monkeypatch):
    """Also where the packages are installed below the file's folder."""
    site = write(tmp_path / "site-packages", installed_package="")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr("potluck.core.ground.errors._INSTALLED", (site,))
    module = load_file(write(tmp_path, mine="import installed_package") / "mine.py")
    try:
        assert sys.modules["installed_package"] is module.installed_package
    finally:
        del sys.modules["installed_package"]


def test_two_files_of_one_name_are_two_modules(tmp_path):
    loaded = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "mine.py"
        path.write_text(f"FOLDER = {folder!r}")
        loaded.append(load_file(path))
    assert [module.FOLDER for module in loaded] == ["one", "two"]
    assert len({module.__name__ for module in loaded}) == 2


@pytest.mark.parametrize("name", ["nets:small", "nets.small"])
def test_unknown__says_how_a_part_of_a_file_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "; of a file" not in str(unknown("model", name, ["cnn2"], "potluck list models"))
    (tmp_path / "nets.py").touch()
    assert str(unknown("model", name, ["cnn2"], "potluck list models")).endswith("; of a file: nets.py:small")
