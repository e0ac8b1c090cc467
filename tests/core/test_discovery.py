import sys

import pytest

from potluck.core.discovery import load_file, matching, module_names, plugins, unknown
from potluck.core.errors import ConfigError, nearest


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


def test_a_file_that_breaks_leaves_no_module(tmp_path):
    path = tmp_path / "breaks.py"
    path.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        load_file(path)
    assert "potluck_file_breaks" not in sys.modules


def test_two_files_of_one_name_are_two_modules(tmp_path):
    loaded = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "mine.py"
        path.write_text(f"FOLDER = {folder!r}")
        loaded.append(load_file(path))
    assert [module.FOLDER for module in loaded] == ["one", "two"]
    assert len({module.__name__ for module in loaded}) == 2
