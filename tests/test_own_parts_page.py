"""The page on own parts: its files, written as they stand there, make the federation that it shows."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from potluck.cli import main
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.resolve import resolve

PAGE = (Path(__file__).parents[1] / "docs/guides/own-parts.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in blocks("python"):
        Path(code.split("\n")[0].removeprefix("# ")).write_text(code)


def test_the_command_of_the_page_runs(written, monkeypatch, capsys):
    command, _ = blocks("text")
    words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [*words, "run.rounds=1", "run.workers=1"])
    with pytest.raises(SystemExit) as stopped:
        main()
    told = capsys.readouterr()
    assert not stopped.value.code, told.err
    assert "confidence" in told.out
    assert sorted(path.name for path in Path("runs").glob("*/code/*")) == ["nets.py", "sizes.py", "sure.py", "waves.py"]


def test_the_table_of_the_page_makes_a_federation(written):
    _, table = blocks("text")
    sites = assemble(resolve(tomllib.loads(table))).federation.sites
    sizes = [len(site.train) + len(site.validation) for site in sites.values()]
    assert sizes[0] >= 30
    assert sizes == sorted(sizes)
    assert sites[1].architecture == "nets.py:small(width=32)"
