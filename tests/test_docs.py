"""What the documentation shows is what there is: code blocks run, quoted files are the files."""

import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import typer

import potluck
from potluck.cli import app, main
from potluck.core.roles import Client, Server
from potluck.experiment.config import resolve
from potluck.experiment.presets import experiment_for
from potluck.methods import list_methods
from potluck.records import TITLES

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


def commands(page: Path) -> list[list[str]]:
    """The arguments of each `potluck` command in a page's blocks."""
    found = []
    for block in re.findall(r"^ *```(?:console|bash)\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        for command in re.split(r"[;\n]", block):
            words = shlex.split(command, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words[:1] == ["potluck"]:
                found.append(words[1:])
    return found


COMMANDS = [pytest.param(words, id=" ".join(words)) for page in PAGES for words in commands(page)]


def parsed(words: list[str]) -> dict[str, object]:
    """The parameters of a command, which is not run."""
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="potluck")
    command = group.get_command(context, words[0])
    assert command, f"there is no command {words[0]!r}"
    return command.make_context(words[0], words[1:], parent=context).params


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_have_the_arguments_that_are_shown(words):
    given = parsed(words)
    target, overrides = given.get("target"), given.get("overrides") or []
    if words[0] == "run" and not given["resume"] and not str(target).endswith((".toml", ".py")):
        first = [target] if target and "=" in str(target) else []
        experiment_for(None if first else target, [*first, *overrides])


def test_commands_that_do_not_exist_are_noticed():
    with pytest.raises(AssertionError, match="no command"):
        parsed(["play"])
    with pytest.raises(Exception, match="No such option"):
        parsed(["run", "--fast"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_configuration_resolve(page):
    for block in blocks(page, "toml"):
        resolve(tomllib.loads(block), page.name)


def test_the_readme_quotes_fedavg_as_it_is():
    (quoted,) = [code for code in blocks(ROOT / "README.md", "python") if code.startswith('"""')]
    assert quoted == (ROOT / "src/potluck/methods/fedavg.py").read_text()


def test_the_readme_lists_methods_that_there_are():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"\w+", row)]
    assert len(named) >= 5
    assert set(named) <= set(list_methods())


METHODS = [code for code in blocks(ROOT / "docs/guides/add-a-method.md", "python") if code.startswith('"""')]


def test_the_guide_quotes_local_as_it_is():
    assert METHODS[0] == (ROOT / "src/potluck/methods/local.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.split(":")[0].strip('"'))
def test_the_methods_of_the_guide_pass_their_checks(method, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(method)
    monkeypatch.setattr(sys, "argv", ["potluck", "check", str(tmp_path / "mine.py")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code, capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def exists(name: str) -> bool:
    """Whether a name in code font is in the public vocabulary, on a `client` or a `server`, a module, or in one."""
    first, *rest = name.split(".")
    if first in ("client", "server"):
        owner = {"client": Client, "server": Server}[first]
        return hasattr(owner, rest[0]) or rest[0] in owner.__dataclass_fields__
    if first != "potluck":
        return hasattr(potluck, first) and all(hasattr(getattr(potluck, first), part) for part in rest)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    return True


def names_in(page: Path) -> list[str]:
    """Names in code font: dotted names, without commands, settings and arguments."""
    found = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", page.read_text())
    return [name for name in dict.fromkeys(found) if name not in NOT_NAMES and not name.startswith("run.")]


NOT_NAMES = ("potluck", "keeps_model", "cohort.ask")


def test_the_glossary_names_what_there_is():
    names = names_in(ROOT / "docs/glossary.md")
    assert len(names) > 40
    assert not [name for name in names if not exists(name)]
    assert not exists("Household")
    assert not exists("potluck.core.task.Judge")
    assert not exists("client.record")


def test_the_guides_vocabulary_names_what_there_is():
    page = (ROOT / "docs/guides/add-a-method.md").read_text()
    table = page[page.index("## The vocabulary") : page.index("## What clients may answer")]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    names = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)", "\n".join(rows))
    assert len(names) > 30
    assert not [name for name in names if name not in ("Annotated", "Literal", "__post_init__") and not exists(name)]


def test_every_page_that_teaches_links_to_the_glossary():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs/guides").glob("*.md")):
        assert "glossary.md" in page.read_text(), page.name


# Words of earlier versions, and the glossary's word for each.
FORBIDDEN = {
    r"judge\w*": "evaluate",
    r"household\w*": "node",
    r"spares": "reusable modules",
    r"epitaph": "reason",
    r"doorm[ae]n": "gate",
    r"knock(s|ed|ing)?": "connect",
    r"parcels?": "envelope",
    r"play(s|ed|ing)?": "run",
    r"share_right": "accuracy",
    r"hash8": "experiment_id",
}
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
CODE_FILES = [path for suffix in ("py", "toml", "j2", "js") for path in (ROOT / "src").rglob(f"*.{suffix}")]
OTHERS = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.*")]
OTHERS = [path for path in OTHERS if path.suffix in (".md", ".py", ".ipynb")]

# What a score was also called, and its only name now: those of `potluck.records.TITLES`.
SCORES = {
    r"(whole|global|shared|entire) (common )?test sets?": "common test set",
    r"own test (examples|sets?|data)": "own test part",
    r"own parts as one": "all own test parts as one",
    r"personal (accurac(y|ies)|scores?|test (parts?|sets?))": "own test parts",
}


def using(word: str, instead: str, files: list[Path]) -> list[str]:
    """The lines that use a word."""
    used = re.compile(rf"\b{word}\b", re.IGNORECASE)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}; write {instead!r}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if used.search(line)
    ]


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_page_and_no_file_uses_a_word_that_the_glossary_replaces(word):
    found = using(word, FORBIDDEN[word], [*WRITTEN, *CODE_FILES])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", SCORES)
def test_a_score_has_one_name_wherever_it_is_shown(word):
    found = using(word, SCORES[word], [*WRITTEN, *CODE_FILES, *OTHERS])
    assert not found, "\n".join(found)


def test_the_glossary_connects_each_measure_with_its_name():
    (entry,) = re.findall(
        r"^- \*\*Measure\*\*.*?(?=^- )", (ROOT / "docs/glossary.md").read_text(), re.DOTALL | re.MULTILINE
    )
    connected = dict(re.findall(r'"(\w+)" is \*\*([\w ]+)\*\*', " ".join(entry.split())))
    assert connected == TITLES
