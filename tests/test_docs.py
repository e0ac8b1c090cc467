"""What the documentation shows is what there is: code blocks run, quoted files are the files."""

import ast
import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import potluck
import potluck.testing.limits
from potluck import fl
from potluck.attackers.settings import Attackers, AttackKind
from potluck.cli import main
from potluck.cli.commands import app
from potluck.cli.terminal import line_of
from potluck.core.roles import Client, Server
from potluck.experiment.running.sweep import read_sweep
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.resolve import resolve
from potluck.methods import get_method, list_methods
from potluck.parts.means import MeanRule
from potluck.recipes import list_recipes
from potluck.records import TITLES, Progress
from sitegen import readme
from sitegen.methods import own_methods

ROOT = Path(__file__).parents[1]
WRITTEN = sorted(page for page in (ROOT / "docs").rglob("*.md") if not page.is_relative_to(ROOT / "docs/_build"))
TUTORIALS = [page for page in WRITTEN if page.parent.name == "tutorials"]  # carried out in test_tutorials.py
PAGES = [ROOT / "README.md", *WRITTEN]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


CODE = [
    pytest.param(code, id=f"{page.name}-{number}", marks=[pytest.mark.slow])
    for page in PAGES
    if page not in TUTORIALS
    for number, code in enumerate(blocks(page, "python"))
    if not code.startswith('"""')  # a method's file: checked below
]


@pytest.mark.parametrize("code", CODE)
def test_code_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "documentation", "exec"), {"__name__": "__main__"})


def commands(page: Path) -> list[list[str]]:
    """The words of each command in a page's blocks; where commands stand behind a `$`, other lines are output."""
    found = []
    for block in re.findall(r"^ *```(?:console|bash)\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        prompted = re.findall(r"^\$ (.+)", block, flags=re.MULTILINE)
        bare = re.sub(r"\s#.*", "", block)  # without comments
        for command in prompted or re.split(r"[;\n]", bare):
            words = shlex.split(command)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                found.append(words)
    return found


ALL_COMMANDS = [(page, words) for page in PAGES for words in commands(page)]
COMMANDS = [
    pytest.param(words[1:], id=" ".join(words[1:]))
    for page, words in ALL_COMMANDS
    if words[0] == "potluck" and page not in TUTORIALS
]
SERVED = [words[1:] for page, words in ALL_COMMANDS if words[:2] in (["potluck", "serve"], ["potluck", "join"])]
OTHERS = [pytest.param(words, id=" ".join(words)) for _, words in ALL_COMMANDS if words[0] != "potluck"]


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


@pytest.mark.parametrize("words", SERVED, ids=" ".join)
def test_commands_of_servers_and_nodes_have_the_arguments_that_are_shown(words):
    assert parsed(words)


def other_command_exists(words: list[str]) -> bool:
    """Whether a command that is not Potluck's does what it says: its target, extra or file is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    match words:
        case ["make", target]:
            return f"\n{target}:" in (ROOT / "Makefile").read_text()
        case ["pip", "install", package]:
            name, _, extra = package.removesuffix("]").partition("[")
            return name == project["name"] and extra in project["optional-dependencies"]
        case ["python", script, *rest] if script.startswith("examples/foreign/"):
            options = (ROOT / "examples/foreign/node.py").read_text()
            return (ROOT / script).exists() and all(f'"{word}"' in options for word in rest if word.startswith("--"))
        case ["python" | "sudo", *rest]:
            files = [word for word in rest if re.search(r"^(?!/)[\w/-]+\.\w+$", word)]
            return all((ROOT / file).exists() for file in files) and (bool(files) or rest[:1] == ["systemctl"])
        case ["source", ".venv/bin/activate"]:
            return True
    return False


@pytest.mark.parametrize("words", OTHERS)
def test_other_commands_are_known_and_name_what_there_is(words):
    assert other_command_exists(words), f"nobody checks {' '.join(words)!r}: teach other_command_exists"


def test_commands_that_do_not_exist_are_noticed():
    with pytest.raises(AssertionError, match="no command"):
        parsed(["play"])
    assert not other_command_exists(["make", "coffee"])
    assert not other_command_exists(["pip", "install", "potluck[coffee]"])
    assert not other_command_exists(["python", "benchmarks/coffee.py"])
    assert not other_command_exists(["python", "examples/foreign/forest.py", "--coffee"])
    assert not other_command_exists(["coffee"])
    with pytest.raises(Exception, match="No such option"):
        parsed(["run", "--fast"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_configuration_resolve(page):
    for block in blocks(page, "toml") if page not in TUTORIALS else []:
        tree = tomllib.loads(block)
        if "sweep" in tree:
            read_sweep(tree, page.name)
        else:
            resolve(tree, page.name)


# Blocks of text, by page: the tests that compare them with what appears.
SHOWN = {
    "analyse.md": "test_sentences__say_who_profits_and_who_loses",
    "add-a-method.md": "test_the_guide_lists_schemas_and_limits_that_there_are",
    "README.md": "test_the_readme_shows_what_the_demo_prints",
    "compare.md": "test_table_of__shows_percent_with_intervals",
    "follow-a-run.md": "test_the_line_of_a_run_is_the_one_that_the_guide_shows",
    "own-parts.md": "test_the_table_of_the_page_makes_a_federation",
    "budgets.md": "test_the_table_of_the_guide_has_ten_clients",
    "twin.md": "test_the_file_of_the_guide_has_a_device_for_twelve_clients",
    "secure-sums.md": "test_real_nodes_sum_securely_and_refuse_a_server_that_does_not_keep_to_it",
    "operate.md": "test_the_guide_shows_what_both_terminals_say",
    "keys.md": "test_keys_certificates_and_the_authority_change_while_all_run",
}
KINDS = {"python", "toml", "console", "bash", "text"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_kind_that_is_tested(page):
    fences = re.findall(r"^ *```(.*)\n", page.read_text(), flags=re.MULTILINE)
    kinds = fences[::2]
    assert set(fences[1::2]) <= {""}
    assert set(kinds) <= KINDS, f"{page.name}: name the language of each block, one of {', '.join(sorted(KINDS))}"
    assert "text" not in kinds or page.name in SHOWN, f"{page.name}: no test compares its block of text"


def test_blocks_of_text_are_compared_by_tests_that_there_are():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in SHOWN.values() if f"def {name}(" not in tests] == []


def test_the_guide_lists_schemas_and_limits_that_there_are():
    schemas, declared, limits = blocks(ROOT / "docs/guides/add-a-method.md", "text")
    named = [name for line in schemas.splitlines() for name in re.findall(r"[A-Za-z]+", line.partition("  ")[0])]
    assert len([name for name in named if exists(f"fl.schema.{name}")]) >= 9
    assert all(exists("fl.schema." + re.match(r"\w+", line)[0]) for line in schemas.splitlines())
    ast.parse(declared)
    sentences = [line.partition("   ")[0].strip() for line in limits.splitlines()]
    assert len(sentences) >= 8
    assert [one for one in sentences if one not in potluck.testing.limits.__doc__] == []


def test_the_guide_on_liars_lists_every_attack_with_its_strength_and_every_rule():
    page = (ROOT / "docs/guides/liars.md").read_text()
    attacks, rules = (dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*?) *\|$", half, flags=re.MULTILINE))
                      for half in page.split("## What helps"))  # fmt: skip
    assert (attacks.pop("kind"), rules.pop("rule")) == ("`strength`", "Of *n* clients it bears")
    assert set(attacks) == set(get_args(AttackKind))
    for kind, strength in attacks.items():
        assert ([float(strength)] if strength.isdigit() else []) == [
            one for one in [Attackers(kind).strength] if one is not None
        ]
    assert tuple(rules) == get_args(MeanRule)


def test_the_line_of_a_run_is_the_one_that_the_guide_shows():
    (shown,) = blocks(ROOT / "docs/guides/follow-a-run.md", "text")
    standing = Progress("fedavg", "training", 6, 20, 4, 10, 5.4, 0.4031, "accuracy 71.5 %", 12_400_000, 72.0)
    assert shown.split(maxsplit=1)[1] == f"{line_of(standing)}\n"


def test_the_readme_quotes_fedavg_as_it_is():
    (quoted,) = [code for code in blocks(ROOT / "README.md", "python") if code.startswith('"""')]
    assert quoted == (ROOT / "src/potluck/methods/fedavg.py").read_text()


OWN = {name: get_method(name) for name in own_methods()}  # imported here, since a test has two seconds


def test_the_readme_lists_every_method_in_its_family():
    text = (ROOT / "README.md").read_text()
    assert readme.with_families(text) == text, "PYTHONPATH=docs python -m sitegen.readme"
    row = next(line for line in text.splitlines() if line.startswith("| **Without a federation.**"))
    assert row.endswith("| `centralised`, `local` |")
    assert readme.with_families(text.replace(row, "| lost |")) == text
    assert all(f"`{name}`" in text for name in OWN)


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


def said_in() -> list[str]:
    """Where the page on contradictions says that each is told: the last cells of its tables."""
    page = (ROOT / "docs/reproduction/contradictions.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {4}
    return [row[-1] for row in rows if row[-1] != "said in"]


@pytest.mark.parametrize("place", dict.fromkeys(said_in()))
def test_contradictions_name_departures_and_recipes_that_there_are(place):
    numbered = re.findall(r"`(\w+)`, departure (\d+)", place)
    for method, number in numbered:
        departures = potluck.testing.limits.section(get_method(method), "Departures from the paper")
        assert any(line.startswith(f"{number}. ") for line in departures)
    names = {*re.findall(r"`([\w-]+)`", place)} - {method for method, _ in numbered}
    assert names <= {*list_recipes(), *list_methods()}
    assert numbered or names or "](" in place or place in ("here", "`potluck reproduce --list`")  # a place at all


def exists(name: str) -> bool:
    """Whether a name in code font is in the public vocabulary, on a `client` or a `server`, a module, or in one."""
    first, *rest = name.split(".")
    if first in ("client", "server"):
        owner = {"client": Client, "server": Server}[first]
        return hasattr(owner, rest[0]) or rest[0] in owner.__dataclass_fields__
    if first == "fl":
        return bool(rest) and _reaches(fl, rest)
    if first != "potluck" or name.removeprefix("potluck.") in dir(potluck):
        return _reaches(potluck, name.removeprefix("potluck.").split("."))
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    return True


def _reaches(owner: Any, path: list[str]) -> bool:
    return hasattr(owner, path[0]) and all(hasattr(getattr(owner, path[0]), part) for part in path[1:])


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
    assert not exists("potluck.core.tasks.task.Judge")
    assert not exists("client.record")


def test_the_guides_vocabulary_names_what_there_is():
    page = (ROOT / "docs/guides/add-a-method.md").read_text()
    table = page[page.index("## The vocabulary") : page.index("## What clients may answer")]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    names = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)", "\n".join(rows))
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
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
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
    found = using(word, FORBIDDEN[word], [CONTRIBUTING, *PAGES, *CODE_FILES])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", SCORES)
def test_a_score_has_one_name_wherever_it_is_shown(word):
    found = using(word, SCORES[word], [CONTRIBUTING, *PAGES, *CODE_FILES, *OTHERS])
    assert not found, "\n".join(found)


def test_the_glossary_connects_each_measure_with_its_name():
    (entry,) = re.findall(
        r"^- \*\*Measure\*\*.*?(?=^- )", (ROOT / "docs/glossary.md").read_text(), re.DOTALL | re.MULTILINE
    )
    connected = dict(re.findall(r'"(\w+)" is \*\*([\w ]+)\*\*', " ".join(entry.split())))
    assert connected == TITLES
