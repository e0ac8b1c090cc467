"""What the documentation shows is what there is: code blocks run, quoted files are the files."""

import re
import sys
from pathlib import Path

import pytest

from potluck.cli import main
from potluck.methods import list_methods

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


CODE = [
    pytest.param(code, id=f"{page.name}-{number}", marks=[pytest.mark.slow])
    for page in PAGES
    for number, code in enumerate(blocks(page, "python"))
    if not code.startswith('"""')  # a method's file: checked below
]


@pytest.mark.parametrize("code", CODE)
def test_code_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "documentation", "exec"), {"__name__": "__main__"})


def test_the_readme_quotes_fedavg_as_it_is():
    (quoted,) = [code for code in blocks(ROOT / "README.md", "python") if code.startswith('"""')]
    assert quoted == (ROOT / "src/potluck/methods/fedavg.py").read_text()


def test_the_readme_lists_methods_that_there_are():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"\w+", row)]
    assert len(named) >= 5
    assert set(named) <= set(list_methods())


@pytest.mark.slow
def test_the_method_of_the_guide_passes_its_checks(tmp_path, monkeypatch, capsys):
    (method,) = [code for code in blocks(ROOT / "docs/guides/add-a-method.md", "python") if code.startswith('"""')]
    assert method == (ROOT / "src/potluck/methods/local.py").read_text()
    (tmp_path / "alone.py").write_text(method)
    monkeypatch.setattr(sys, "argv", ["potluck", "check", str(tmp_path / "alone.py")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code, capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"
