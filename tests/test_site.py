"""The documentation's site: every method, key, command and name has its place, and a broken link stops the build."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import potluck
from potluck.core.ground.discovery import module_names
from potluck.core.tasks.named import TASKS
from potluck.experiment.settings.keys import options_of, settings_of
from potluck.experiment.settings.schema import TABLES
from potluck.methods import get_method
from potluck.models import get_model, list_models
from potluck.recipes import list_recipes, load_recipe
from sitegen import methods, reference
from sitegen.assemble import linked_files, pages, written
from sitegen.docstrings import as_rst
from sitegen.text import code, default, kind, prose, table

ROOT = Path(__file__).parents[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
METHODS = methods.own_methods()
SECTIONS = [
    *("What it needs", "Wire", "Facts", "Reproduction", "Symbols", "Hyper-parameters", "Limits"),
    *("Departures from the paper", "The file"),
]


def sections(text):
    """The text below each heading of the second level."""
    outside = re.sub(
        r"^```.*?^```", lambda block: block[0].replace("\n## ", "\n "), text, flags=re.DOTALL | re.MULTILINE
    )
    heads, bodies = (
        re.findall(r"^## (.+)", outside, flags=re.MULTILINE),
        re.split(r"^## .+\n", outside, flags=re.MULTILINE),
    )
    return dict(zip(heads, bodies[1:], strict=True))


@pytest.fixture(scope="module")
def site():
    return pages(ROOT)


@pytest.mark.parametrize("name", METHODS)
def test_page__has_every_section_and_every_hyper_parameter_of_a_method(name):
    method = methods.documented(name)
    text = methods.page(method)
    found = sections(text)
    assert list(found) == SECTIONS
    assert all(body.strip() for body in found.values())
    assert text.startswith("# ")
    assert f"\npotluck run {name}\n" in text
    for one in settings_of(get_method(name)):
        assert f"\n{code(one.key)}" in found["Hyper-parameters"], one.key
        assert prose(one.meaning).split("\n")[0] in found["Hyper-parameters"], one.key
    for entry in (*method.facts.down, *method.facts.up):
        assert code(entry) in found["Wire"]
    numbered = len(re.findall(r"^\d+\. ", method.sections["Departures from the paper"], flags=re.MULTILINE))
    assert len(re.findall(r"^\d+\. ", found["Departures from the paper"], flags=re.MULTILINE)) == numbered
    assert method.code.startswith(("from ", "import "))
    assert f"class {method.cls.__name__}(" in found["The file"]


def test_page__titles_differ_and_papers_are_linked():
    own = [methods.documented(name) for name in METHODS]
    assert len({one.title for one in own}) == len({one.short for one in own}) == len(own) > 50
    papers = [one for one in own if one.source]
    assert len(papers) == len(own) - 2  # local and centralised
    linked = [one for one in papers if "://" in one.source]
    assert len(linked) > len(papers) - 5
    assert all(re.search(r"<https?://[^>]*[^.>]>\.?", methods.page(one)) for one in linked)


def test_page__says_what_can_be_reproduced():
    method = methods.documented("fedavg")
    found = sections(methods.page(method, "Table 1, at a tenth of its size"))["Reproduction"]
    assert found.strip() == "Table 1, at a tenth of its size"
    assert "is a recipe" in sections(methods.page(method))["Reproduction"]


def test_page__quotes_the_evidence(monkeypatch, tmp_path):
    scaffold = methods.documented("scaffold")
    said = sections(methods.page(scaffold))["Facts"]
    assert re.search(r"A \[second computation\]\(.+\) from the paper differs by at most \de-1\d\.", said)
    assert re.search(r"clients keep\W+control\W", said)
    monkeypatch.setattr(methods, "EVIDENCE", tmp_path / "evidence.md")
    methods.EVIDENCE.write_text("| moon | w | 1e-16 |\n")
    assert "second computation" not in sections(methods.page(scaffold))["Facts"]


def test_reproduction__lists_the_recipes_in_which_a_method_stands(monkeypatch):
    """As `potluck.recipes` has them: names, and recipes with a title, a paper and methods."""
    paper = SimpleNamespace(place="Table 1")
    recipes = {name: SimpleNamespace(title="Accuracy", paper=paper, methods=("fedin",)) for name in ("one", "two")}
    monkeypatch.setattr(methods, "list_recipes", lambda: list(recipes))
    monkeypatch.setattr(methods, "load_recipe", recipes.__getitem__)
    lines = methods.reproduction("fedin", cards={"two"}).split("\n\n")[1].split("\n")
    assert lines[0] == "- `potluck reproduce one`: Accuracy, Table 1"
    assert lines[1] == "- `potluck reproduce two`: Accuracy, Table 1 ([card](../reproduction/two.md))"
    assert methods.reproduction("fedavg") == ""


def test_documented__refuses_a_method_without_one_of_the_sections(tmp_path):
    text = (ROOT / "src/potluck/methods/fedavg.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace("\nLimits\n", "\nlimits\n"))
    with pytest.raises(ValueError, match=r"mine\.py: the documentation lacks Limits"):
        methods.documented(str(tmp_path / "mine.py"))


def test_groups__hold_every_method_once(site):
    lists = {
        path: re.findall(r"<(\w+)>$", text, flags=re.MULTILINE) for path, text in site.items() if "/family-" in path
    }
    assert all(lists.values())
    assert sorted(name for names in lists.values() for name in names) == METHODS
    places = {name: path for path, names in lists.items() for name in names}
    expected = {"local": "alone", "heterofl": "parts", "inclusivefl": "parts", "fml": "common", "fedmd": "public"}
    expected |= {"scaffold": "weights", "fedin": "weights", "fedfomo": "weights", "lgfedavg": "weights"}
    expected |= {"fedproto": "classes", "fedgkt": "classes", "fd": "classes", "fedet": "public"}
    assert {name: places[name] for name in expected} == {k: f"methods/family-{v}.md" for k, v in expected.items()}


def test_index__names_every_method(site):
    assert re.findall(r"\]\((\w+)\.md\) \| `(\w+)`", site["methods/index.md"]) != []
    assert sorted(re.findall(r"\| `(\w+)` \|", site["methods/index.md"])) == METHODS


def test_configuration__explains_every_key(site):
    text = site["reference/configuration.md"]
    keys = {f"{name}.{one.key}": one for name, cls in TABLES.items() for one in settings_of(cls)}
    entries = re.findall(r"^```\{confval\} (\S+)\n:type: (.+)\n:default: (.+)\n\n(.+)", text, flags=re.MULTILINE)
    assert [key for key, *_ in entries] == list(keys)
    assert all(prose(keys[key].meaning).startswith(meaning) for key, *_, meaning in entries)
    assert ("run.rounds", "whole number, at least 1", "`20`") in [entry[:3] for entry in entries]


def test_command_line__has_every_command_argument_and_option(site):
    found = sections(site["reference/command-line.md"])
    commands = reference.commands()
    assert list(found) == ["`potluck`", *(f"`potluck {name}`" for name in commands)]
    assert len(commands) > 12
    for name, command in commands.items():
        text = found[f"`potluck {name}`"]
        assert prose(command.help) in text
        for one in command.params:
            assert (one.opts[0] if one.param_type_name == "option" else one.make_metavar(None)) in text
            assert one.help
            assert f": {prose(one.help)}" in text
    assert ": Folder in which the run's folder is made. Default: `runs`." in found["`potluck run`"]
    assert "Required." in found["`potluck export`"]
    assert "Sentinel" not in site["reference/command-line.md"]


def test_parts__have_their_places(site):
    for page, names in {
        "models": list_models(),
        "datasets": module_names("potluck.data.datasets"),
        "partitions": module_names("potluck.data.partition"),
        "tasks": list(TASKS),
    }.items():
        assert [name for name in names if code(name) not in site[f"reference/{page}.md"]] == []


def test_recipes__have_their_methods_deviations_and_cards(site):
    found = sections(site["reference/recipes.md"])
    assert list(found) == [code(name) for name in list_recipes()]
    recipe = load_recipe("fedin-table3")
    text = found[code("fedin-table3")]
    assert all(f"](../methods/{name}.md)" in text for name in recipe.methods)
    assert all(f"- {prose(deviation)}" in text for deviation in recipe.deviations)
    cards = {path.stem for path in (ROOT / "docs/reproduction").glob("*.md")} - {"README", "contradictions"}
    assert {name for name, text in found.items() if "../reproduction/" in text} == {code(card) for card in cards}


def test_models__have_each_its_own_defaults(site):
    text = site["reference/models.md"]
    for name in list_models():
        entry = text[text.index(f"\n{code(name)}\n: ") :].split("\n\n")[0]
        for one in options_of(get_model(name), without=("scale",)):
            assert f"{code(one.key)} = {default(one)}" in entry, name
            assert f"\n{code(one.key)}, {kind(one)}\n: {prose(one.meaning)}" in text


def test_python_names__have_each_one_place(site):
    text = "\n".join(text for path, text in site.items() if path.startswith("reference/python/"))
    documented = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, flags=re.MULTILINE)
    assert len(documented) == len(set(documented))
    flat, rooms = reference.words()
    named = {f"potluck.{home}.{name}" for name, home in potluck._HOMES.items()}
    named |= {f"{home}.{name}" for name, home in flat.items()}
    assert not named - set(documented)
    assert all(any(name.startswith(f"{home}.") for name in documented) for home in rooms.values())


def test_python_names__include_what_the_pages_import(site):
    text = "\n".join(text for path, text in site.items() if path.startswith("reference/python/"))
    prose_pages = "\n".join((ROOT / file).read_text() for file in written(ROOT))
    imports = re.findall(r"^from (potluck\.[\w.]+) import (.+)$", prose_pages, flags=re.MULTILINE)
    named = {(home, name.strip()) for home, names in imports for name in names.split(",")}
    names = {f"{home}.{name}" for home, name in named if name not in potluck._HOMES}
    assert len(named) > 5
    assert not {name for name in names if not re.search(rf":: {re.escape(name)}$", text, flags=re.MULTILINE)}


def test_pages__has_every_written_page_and_its_links_lead_to_places_on_the_site(site):
    homes = written(ROOT)
    assert {"tutorials/first-run.md", "benchmarks/mini_table.md", "changelog.md", "security.md"} <= set(homes.values())
    assert set(homes.values()) <= set(site)
    places = set(site) | set(linked_files(ROOT))
    assert "../benchmarks/kills.md" in site["concepts/a-round.md"]
    assert "../files/examples/first_steps.ipynb" in site["guides/python.md"]
    assert "deploy has units" in site["guides/across-machines.md"]  # a folder: its name without a link
    for home in homes.values():
        text = re.sub(r"^ *```.*?^ *```", "", site[home], flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if not target.startswith("http"):
                assert os.path.normpath(os.path.join(os.path.dirname(home), target)) in places, f"{home}: {target}"


@pytest.mark.slow
def test_pages__takes_up_new_pages_by_themselves(tmp_path):
    for place in ("docs", "benchmarks", "CITATION.cff", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        (tmp_path / place).symlink_to(ROOT / place)
    (tmp_path / "docs").unlink()
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build"))
    (tmp_path / "docs/guides/new.md").write_text("# New\n")
    (tmp_path / "docs/comparison.md").write_text("# Beside others\n")
    (tmp_path / "docs/reproduction/fedin.md").write_text("# Cards of FedIN\n")
    found = pages(tmp_path)
    assert "\nnew\n" in found["guides/index.md"]
    assert "\nfedin\n" in found["reproduction/index.md"]
    assert "\ncomparison\n" in found["index.md"]
    assert "\nreproduction/index\n" in found["index.md"]


def test_prose__keeps_code_and_addresses_and_escapes_the_rest():
    assert prose("w_in * 2 of `a_b`, |x| <y> [z]") == r"w\_in \* 2 of `a_b`, \|x\| \<y> \[z\]"
    assert prose("See https://a.org/x_y. Then") == "See <https://a.org/x_y>. Then"
    assert prose("first\n- rho") == "first\n\\- rho"
    assert prose("As:\n\n    a*b\n\nNext") == "As:\n\n```text\na*b\n```\n\nNext"
    assert table(("a",), [("|w|",), (r"\|",)]).split("\n")[2:] == [r"| \|w\| |", r"| \| |"]


def test_as_rst__reads_docstrings_as_markdown():
    assert as_rst(["Of `x` and `y`s, |w| * 2, a_ b."]) == [r"Of ``x`` and ``y``\ s, \|w\| \* 2, a\_ b."]
    formula = ["Text.", "", "    a = b * c", "", "More."]
    assert as_rst(formula) == ["Text.", "", "::", "", "    a = b * c", "", "More."]
    google = ["Text.", "", "Args:", "    x: the `x`.", "        on", "", "Raises:", "    E: why."]
    assert as_rst(google) == [line.replace("`x`", "``x``") for line in google]


def sphinx(source, html):
    """Sphinx on a folder of pages, as `make docs` runs it."""
    program = "import sys; from pathlib import Path; from sitegen.__main__ import run_sphinx;"
    program += "sys.exit(run_sphinx(Path(sys.argv[1]), Path(sys.argv[2])))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "docs"), str(ROOT / "src")])}
    return subprocess.run(
        [sys.executable, "-c", program, source, html], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_broken_reference_stops_the_build(tmp_path):
    source, html = tmp_path / "source", tmp_path / "html"
    source.mkdir()
    (source / "index.md").write_text("# A\n\n[here](b.md#c)\n\n```{toctree}\nb\n```\n")
    (source / "b.md").write_text("# B\n\n## C\n")
    assert sphinx(source, html).returncode == 0
    broken = {
        "[there](nowhere.md)": "nowhere.md",
        "[there](b.md#unheard)": "unheard",
        "{py:class}`potluck.core.requests.fit.Nothing`": "potluck.core.requests.fit.Nothing",
        "{confval}`run.nothing`": "run.nothing",
    }
    (source / "b.md").write_text("# B\n\n## C\n\n" + "\n\n".join(broken))
    (source / "alone.md").write_text("# In no list of pages\n")
    done = sphinx(source, html)
    assert done.returncode == 1
    assert [words for words in (*broken.values(), "alone.md") if words not in done.stderr] == []


SEEN = (
    *("index", "methods/index", "methods/family-weights", "methods/fedin", "methods/flanc", "reference/configuration"),
    *("reference/command-line", "reference/python/words", "reference/python/rooms", "benchmarks/mini_table"),
    *("tutorials/own-method", "guides/compare", "hostile-answers", "changelog"),
)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome on the PATH")
def test_the_site_reads_well_in_a_browser_without_a_network(tmp_path):
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "docs"), str(ROOT / "src")])}
    built = subprocess.run(
        [sys.executable, "-m", "sitegen"], env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    html = Path(built.stdout.strip()).parent
    complaints = []
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for width in (1280, 390):
            page = browser.new_context(viewport={"width": width, "height": 800}, offline=True).new_page()
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda asked: asked.url.startswith("file:") or complaints.append(asked.url))
            for name in SEEN:
                page.goto((html / f"{name}.html").as_uri())
                wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert wider <= 0, f"{name} is {wider} px wider than {width}"
        page.goto((html / "reference/python/running.html").as_uri())
        page.goto(page.locator("a[href$='_modules/potluck/api/run.html#run']").evaluate("link => link.href"))
        assert "def run(" in page.locator("pre").inner_text()
        page.goto((html / "tutorials/first-run.html").as_uri())
        assert page.locator("a[href='../methods/fedin.html']").count() >= 1  # `fedin` leads to its page
        assert page.locator("a[href*='configuration.html#confval-run.rounds']").count() >= 1
        assert complaints == []
        for words, target in {  # from the disk without the extracts of pages, which a browser does not let it read
            "FedProto": "methods/fedproto.html",
            "run.cohort_fraction": "reference/configuration.html",
            "holdout": "tutorials/own-model.html",
            "StagedNet": "reference/python/words.html",
        }.items():
            page.goto((html / "search.html").as_uri() + f"?q={words}")
            page.locator(f"#search-results a[href*='{target}']").first.wait_for(timeout=20_000)
        browser.close()
