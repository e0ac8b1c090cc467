import sys
from pathlib import Path

import pytest

import potluck.methods
from potluck.core.ground.errors import ConfigError
from potluck.core.method import Method
from potluck.methods import get_method, list_methods

METHOD = '''"""Elsewhere: a method of another package."""

from dataclasses import dataclass

from potluck.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Elsewhere(FedAvg):
    """As FedAvg."""
'''


@pytest.fixture
def another_package(tmp_path, monkeypatch):
    """An installed distribution that offers a method by an entry point."""
    (tmp_path / "guest_methods.py").write_text(METHOD)
    info = tmp_path / "guest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[potluck.methods]\nelsewhere = guest_methods\nby_class = guest_methods:Elsewhere\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("guest_methods", None)


def test_names_are_those_of_the_files():
    files = Path(potluck.methods.__file__).parent.glob("[!_]*.py")
    assert list_methods() == sorted(path.stem for path in files)
    assert list_methods("scaff*") == ["scaffold"]


@pytest.mark.parametrize("name", list_methods())
def test_every_name_gives_the_one_method_of_its_file(name):
    method = get_method(name)
    assert issubclass(method, Method)
    assert method.__name__.lower() == name
    assert method.__module__ == f"potluck.methods.{name}"


@pytest.mark.usefixtures("another_package")
def test_methods_of_other_packages_are_listed_and_found():
    assert {"elsewhere", "by_class"} < set(list_methods())
    assert get_method("elsewhere") is get_method("by_class")
    assert get_method("elsewhere").__name__ == "Elsewhere"


def test_a_file_dropped_among_the_methods_is_one(monkeypatch, tmp_path):
    (tmp_path / "dropped.py").write_text(METHOD)
    monkeypatch.setattr(potluck.methods, "__path__", [*potluck.methods.__path__, str(tmp_path)])
    monkeypatch.setattr(potluck.methods.__spec__, "submodule_search_locations", potluck.methods.__path__)
    assert "dropped" in list_methods()
    assert get_method("dropped").__name__ == "Elsewhere"
    sys.modules.pop("potluck.methods.dropped", None)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown method 'fedinn'; nearest: fedin, .*; all: potluck list methods"):
        get_method("fedinn")


def test_a_file_with_no_method_or_two_is_refused(tmp_path):
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="expected one class that derives from Method, found none"):
        get_method(str(tmp_path / "none.py"))
    second = METHOD.split('"""As')[0].split("@dataclass")[1].replace("Elsewhere", "Second")
    (tmp_path / "two.py").write_text(METHOD + "\n\n@dataclass" + second + '    """Too."""\n')
    with pytest.raises(ConfigError, match="found Elsewhere, Second"):
        get_method(str(tmp_path / "two.py"))
