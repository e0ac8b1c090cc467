"""What goes to PyPI: the checks that need no network. `make package` builds, installs and uses it."""

import importlib.util
import re
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import potluck

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def package():
    spec = importlib.util.spec_from_file_location("package", ROOT / ".ci" / "package.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def description(substitutions):
    """The README as PyPI gets it."""
    text = (ROOT / "README.md").read_text()
    for one in substitutions:
        text = re.sub(one["pattern"], one["replacement"], text)
    return text


def facts(text, version=PROJECT["project"]["version"]):
    message = Message()
    message["License-Expression"], message["Version"] = PROJECT["project"]["license"], version
    message.set_payload(text)
    return message


def test_the_version_is_one_everywhere(package):
    assert PROJECT["project"]["version"] == potluck.__version__
    substitutions = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    package.check_metadata(facts(description(substitutions)))
    with pytest.raises(SystemExit, match=r"CITATION\.cff has another version"):
        package.check_metadata(facts(description(substitutions), "9.9"))


def test_a_newer_torch_than_the_checkouts_stays_in_a_users_environment(package):
    torch = next(one for one in map(Requirement, PROJECT["project"]["dependencies"]) if one.name == "torch")
    assert torch.specifier.contains("2.15.0")
    assert torch.specifier.contains("99.0")
    (bound,) = [line for line in package.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert not Requirement(bound).specifier.contains("2.15.0")
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert len(installs) == 1
    assert "-c constraints.txt" in installs[0]


def test_the_description_on_pypi_links_to_nothing_that_is_not_there(package):
    with pytest.raises(SystemExit, match=r"links that lead nowhere on PyPI: .*docs/images/demo\.png"):
        package.check_metadata(facts(description([])))
    with pytest.raises(SystemExit, match="does not name the files"):
        package.check_metadata(facts("# Potluck\n"))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with the files that git knows")
def test_a_file_that_git_does_not_know_is_noticed_in_the_wheel(package, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "in_sdist", lambda sdist: package_files)
    tracked = package.ran(["git", "ls-files"]).split("\n")[:-1]
    tops = (*PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"], "pyproject.toml", ".gitignore")
    package_files = {name for name in tracked if name.split("/")[0] in tops} | {"PKG-INFO"}
    (sdist := tmp_path / "potluck.tar.gz").touch()
    wheel = tmp_path / "potluck.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as files:
        for name in tracked:
            if name.startswith("src/potluck/"):
                files.write(ROOT / name, name.removeprefix("src/"))
        files.writestr("potluck/runs/notes.txt", "mine")
    with pytest.raises(SystemExit, match=r"should not hold potluck/runs/notes\.txt"):
        package.check_contents(sdist, wheel)


def test_a_name_on_the_path_that_leads_to_no_python_is_passed_over(package, tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    (broken := tmp_path / "path" / "python3.99").write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"), prepend=":")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert package.found("3.99") is None
    working = tmp_path / "pyenv" / "versions" / "3.99.1" / "bin" / "python"
    working.parent.mkdir(parents=True)
    working.write_text("#!/bin/sh\necho 3.99\n")
    working.chmod(0o755)
    assert package.found("3.99") == working
