"""`potluck reproduce`: ours beside a paper's numbers, which never pass for ours."""

import csv
import glob
import importlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from potluck.analysis.read import last, read_run
from potluck.data.datasets import list_datasets
from potluck.data.datasets._hub import HubSource
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.several import _start
from potluck.recipes import list_recipes, load_recipe
from potluck.recipes.beside import plan

RECIPE = """\
title = "Three methods on digits"
seeds = 5
deviations = ["The paper is made up."]
figures = []

[paper]
title = "A paper: with a subtitle"
place = "Table 9"
url = "https://example.org"

[measured]
by = "common"
words = "accuracy on the test set."

[experiment.federation]
dataset = "digits"
clients = 20
validation_fraction = 0.0
models = [{ name = "cnn2", width = 4 }, { name = "cnn3", width = 4 }]

[experiment.run]
rounds = 20
cohort_fraction = 0.5

[settings.iid]
images = 1437
federation = { partition = { name = "iid" } }

[settings.skewed]
images = 1437
federation = { partition = { name = "dirichlet", alpha = 0.5 } }

[[columns]]
title = "IID"
setting = "iid"

[[columns]]
title = "non-IID"
setting = "skewed"

[[columns]]
title = "rounds to 1 %"
setting = "skewed"
rounds_to = 1

[[columns]]
title = "rounds to 100 %"
setting = "skewed"
rounds_to = 100

[[columns]]
title = "millions"
setting = "iid"
millions = true

[[rows]]
name = "FedAvg"
paper = ["97.31", "96.42 ± 1.53", "7", "86", "12.28"]
method = { name = "fedavg" }

[[rows]]
name = "Local"
paper = ["95.55", "", "", "", ""]
note = "Shares nothing."
method = { name = "local" }

[[rows]]
name = "Absent"
paper = ["94.44", "93.33 ± 0.22", "", "", ""]
missing = "nobody has written it"
"""
PAPERS = ("97.31", "96.42 ± 1.53", "95.55", "94.44", "93.33 ± 0.22")
BROKEN = '[[rows]]\nname = "FedMD"\npaper = ["92.22", "", "", "", ""]\nmethod = { name = "fedmd" }\n'
TRAIN, TEST = 400, 50  # images of noise
SMALL = "--scale 0.01 --processes 1"


@pytest.fixture
def recipe(tmp_path):
    """A recipe of our own, in the current folder."""
    (tmp_path / "mine.toml").write_text(RECIPE)
    return load_recipe(str(tmp_path / "mine.toml"))


@pytest.fixture(scope="module")
def first_seed(tmp_path_factory):
    """The finished runs of the recipe at scale 0.01, with one seed, made once."""
    parent = tmp_path_factory.mktemp("made")
    (parent / "mine.toml").write_text(RECIPE)
    run_here(plan(load_recipe(str(parent / "mine.toml")), 0.01, 1), parent / "runs")
    return parent / "runs"


@pytest.fixture
def runs(recipe, first_seed, tmp_path):
    """Those runs where `potluck reproduce` finds them."""
    return shutil.copytree(first_seed, tmp_path / "runs" / "reproduce")


@pytest.fixture(scope="module")
def hub_of_noise(tmp_path_factory):
    """A folder in the hub's layout with every data set of the hub: images of noise, with every label that fits in."""
    folder, rng = tmp_path_factory.mktemp("hub"), np.random.default_rng(0)
    for name in list_datasets():
        source = getattr(importlib.import_module(f"potluck.data.datasets.{name}"), "_SOURCE", None)
        if isinstance(source, HubSource):
            for split, count in (("train", TRAIN), (source.test_split, TEST)):
                write(folder, source, split, rng, count)
    return folder


@pytest.fixture
def on_noise(hub_of_noise, monkeypatch):
    """Data sets are those images of noise."""
    monkeypatch.setenv("POTLUCK_DATA", str(hub_of_noise))
    monkeypatch.setenv("XDG_CACHE_HOME", str(hub_of_noise / "cache"))


def few_images(recipe):
    """The setting by which a recipe has as many images of noise as its clients need."""
    return f"federation.train_fraction={1.0 if recipe.keep_clients else 0.3}"


def write(folder, source, split, rng, count):
    """Write one split of a data set."""
    import pyarrow
    from pyarrow import parquet

    channels, height, width = source.image_shape
    shape = (height, width, 3) if channels == 3 else (height, width)
    rows = [{"bytes": png(rng.integers(0, 256, shape, dtype=np.uint8)), "path": None} for _ in range(count)]
    images = pyarrow.array(rows, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    labels = pyarrow.array([index % source.num_classes for index in range(count)], pyarrow.int64())
    place = folder / source.repository / (source.configuration or "data") / f"{split}-00000-of-00001.parquet"
    place.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({source.image: images, source.label: labels}), place)


def png(pixels):
    """An image as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def run_here(planned, parent):
    """Run what is planned in this process."""
    parent.mkdir(parents=True, exist_ok=True)
    for one in planned:
        _start(one.experiment, parent.with_suffix(".claim"), parent, lambda kind, value: None)


def of_row(runs, method, partition):
    """The runs of one row in one setting, by seed."""
    found = [read_run(folder) for folder in sorted(runs.glob("2*"))]
    wanted = [
        run for run in found if (run.method, run.config["federation"]["partition"]["name"]) == (method, partition)
    ]
    return sorted(wanted, key=lambda run: run.seed)


def cells(text, row):
    """The cells of a row in the printed tables, or in those of a card."""
    lines = [line for line in text.splitlines() if line.strip().lstrip("| ").startswith(f"{row} ")]
    return re.split(r"\s*\|\s*|\s{2,}", lines[0].strip().strip("|").strip())[1:]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fedin-table", "unknown recipe 'fedin-table'; nearest: fedin-table"),
        ("none.toml", "none.toml: no such file"),
        ("mine.toml --scale 0", "--scale 0: expected a number above 0 and at most 1, such as 0.1"),
        ("mine.toml --scale 1.5", "--scale 1.5: expected a number above 0 and at most 1"),
        ("mine.toml --scale nan", "--scale nan: expected a number above 0 and at most 1"),
        ("mine.toml --scale small", "--scale"),
        ("mine.toml --seeds 0", "--seeds"),
        ("mine.toml --only FedIN", "mine has no row 'FedIN'; its rows: FedAvg, Local, Absent"),
        ("mine.toml --columns accuracy", "mine has no column 'accuracy'; its columns: IID; non-IID; rounds to 1 %"),
        ("mine.toml --card card.html", "--card card.html: a card is written as Markdown"),
        ("mine.toml --card no/card.md", "--card no/card.md: no such folder no; make it first"),
        ("mine.toml run.rounds=many", "mine, FedAvg, iid: run.rounds"),
        ("mine.toml run.round=3", "mine, FedAvg, iid: unknown key run.round; nearest: run.rounds"),
        ("--only FedAvg", "name a recipe too; all: potluck reproduce"),
        ("run.rounds=3", "name a recipe too; all: potluck reproduce"),
        ("--list --only FedAvg", "name a recipe too; all: potluck reproduce"),
        ("--list mine.toml", "--list runs no recipe, found mine.toml; leave out one of the two"),
        ("--paper fedin-arxiv", "--paper chooses what --list lists"),
        ("--list --paper fedavg", "no paper 'fedavg'; the papers: fedepth, fedin-arxiv, "),
    ],
)
@pytest.mark.usefixtures("recipe")
def test_bad_input_is_refused_in_one_line_before_anything_runs(potluck, tmp_path, line, expected):
    outcome = potluck(f"reproduce {line}")
    assert outcome.code == 2
    assert expected in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_without_a_name_it_lists_every_recipe_with_its_size(potluck):
    outcome = potluck("reproduce")
    assert outcome.code == 0
    for name in list_recipes():
        assert f" {name} " in outcome.out
    line = next(line for line in outcome.out.splitlines() if " fedin-table1 " in line)
    assert "FedIN (revision), Table 1" in line
    assert "136 × 500 × 100" in line
    assert "at the papers' full size" in outcome.out


def test_the_papers_tables_and_figures_are_listed_with_what_reproduces_them(potluck):
    outcome = potluck("reproduce --list")
    assert outcome.code == 0
    words = set(re.split(r"[\s,;]+", outcome.out))
    assert set(list_recipes()) <= words
    assert max(map(len, outcome.out.splitlines())) <= 100
    lines = {tuple(re.split(r"\s{2,}", line.strip())) for line in outcome.out.splitlines()}
    assert ("Table 4 (left)", "three kinds of noise", "fedorion-table4-noise") in lines
    assert ("Figure 11", "the two ways of averaging", "a sketch") in lines


def test_of_the_papers_a_pattern_chooses(potluck):
    out = potluck("reproduce --list --paper 'fedin*'").out
    assert "Table VIII" in out
    assert "Table 5a" in out
    assert "fedorion" not in out


@pytest.mark.usefixtures("recipe")
def test_what_was_not_run_has_a_dash_and_the_papers_numbers_stand_under_paper_alone(potluck, tmp_path):
    outcome = potluck("reproduce mine.toml --scale 0.1 --finished --card card.md")
    assert outcome.code == 0
    assert not (tmp_path / "runs").exists()
    assert "8 runs, 0 of them finished" not in outcome.out  # two rows in two settings
    assert "4 runs, 0 of them finished" in outcome.out
    assert "not the paper's experiment but one at scale 0.1" in outcome.out
    for text in (outcome.out, (tmp_path / "card.md").read_text()):
        for row, papers in (("FedAvg", PAPERS[:2]), ("Local", ("95.55", "–")), ("Absent", PAPERS[3:])):
            found = cells(text, row)
            assert found[0::3] == ["–"] * 5, row
            assert tuple(found[1::3])[:2] == papers, row
            assert found[2::3] == ["–"] * 5, row
        for number in PAPERS:
            assert text.count(number) == 1
        assert "Not in Potluck: Absent: nobody has written it" in text


@pytest.mark.slow
def test_ours_are_the_records_and_the_gap_is_ours_less_the_papers(potluck, tmp_path, recipe, runs):
    run_here([one for one in plan(recipe, 0.01, 2) if (one.row, one.seed) == ("FedAvg", 1)], runs)
    outcome = potluck("reproduce mine.toml --scale 0.01 --seeds 2 --finished --card card.md")
    assert outcome.code == 0
    assert "8 runs, 6 of them finished" in outcome.out
    scores = [100 * last(run).value("common", "accuracy") for run in of_row(runs, "fedavg", "iid")]
    assert len(scores) == 2
    mean = sum(scores) / 2
    for text in (outcome.out, (tmp_path / "card.md").read_text()):
        ours, paper, gap = cells(text, "FedAvg")[:3]
        assert float(ours.split(" ± ")[0]) == pytest.approx(mean, abs=0.051)
        assert float(ours.split(" ± ")[1]) == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5, abs=0.051)
        assert paper == "97.31"
        assert float(gap.replace("−", "-")) == pytest.approx(mean - 97.31, abs=0.051)
        rounds, never, millions = (cells(text, "FedAvg")[6:9], cells(text, "FedAvg")[9:12], cells(text, "FedAvg")[12:])
        assert rounds == ["1", "7", "–"]  # of a scaled run, so the gap would say nothing
        assert never == [">2", "86", "–"]
        assert millions[1] == "12.28"
        assert float(millions[0]) - 12.28 == pytest.approx(float(millions[2].replace("−", "-")), abs=0.011)
        assert cells(text, "Absent")[::3] == ["–"] * 5


@pytest.mark.slow
def test_millions_are_the_numbers_that_a_client_sends(potluck, runs):
    (run,) = of_row(runs, "fedavg", "iid")
    sent = [record.bytes_up / len(record.replied) / 4e6 for record in run.rounds]
    shown = cells(potluck("reproduce mine.toml --scale 0.01 --finished").out, "FedAvg")[12]
    assert shown == f"{sum(sent) / len(sent):.2f}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "millions", "memory"),
    [
        ("FedAvg", "12.28", "235.0"),
        ("Scaffold", "24.56", "470.0"),
        ("MOON", "12.28", "705.0"),
        ("InclusiveFL", "12.28", "235.0"),
        ("InCoAvg", "12.28", "235.0"),
        ("FedIN", "12.35", "235.3"),
    ],
)
def test_the_overheads_of_fedin_are_the_papers_digits_by_its_way_of_counting(
    potluck, hub_of_noise, monkeypatch, row, millions, memory
):
    """Its five networks at full size; what they learn of is noise, which changes no number that they send."""
    monkeypatch.setenv("POTLUCK_DATA", str(hub_of_noise))
    monkeypatch.setenv("XDG_CACHE_HOME", str(hub_of_noise / "cache"))
    few = "federation.train_fraction=0.5 run.executor=sequential"
    found = cells(potluck(f"reproduce fedin-table3 --only {row} --processes 1 {few}").out, row)
    assert found[3:] == [millions, millions, "+0.00", memory, memory, "+0.0"]


def test_a_run_of_another_scale_or_seed_is_not_taken_for_this_one(potluck, runs):
    assert "4 runs, 4 of them finished" in potluck("reproduce mine.toml --scale 0.01 --finished").out
    assert "4 runs, 0 of them finished" in potluck("reproduce mine.toml --scale 0.5 --finished").out
    assert "4 runs, 0 of them finished" in potluck("reproduce mine.toml --finished").out
    half = potluck("reproduce mine.toml --scale 0.01 --seeds 2 --finished").out
    assert "8 runs, 4 of them finished" in half
    assert cells(half, "FedAvg")[0].endswith("(1 of 2 seeds)")
    changed = potluck("reproduce mine.toml --scale 0.01 --finished method.training.lr=0.1").out
    assert "4 runs, 0 of them finished" in changed
    assert "Changed by hand: method.training.lr=0.1." in changed


def test_only_a_part_is_run_as_large_as_in_the_whole_table(potluck, runs):
    part = potluck("reproduce mine.toml --scale 0.01 --finished --only 'loc*' --columns iid").out
    assert "1 runs, 1 of them finished" in part
    assert "97.31" not in part
    assert "rounds to" not in part


@pytest.mark.usefixtures("recipe")
def test_data_that_are_not_there_are_said_once_and_no_run_begins(potluck, tmp_path, monkeypatch):
    (tmp_path / "hub" / "uoft-cs" / "cifar10").mkdir(parents=True)
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path / "hub"))
    outcome = potluck("reproduce mine.toml --scale 0.01 federation.dataset=cifar10 federation.models=cnn2")
    assert outcome.code == 1
    assert "cifar10: no file train-*.parquet" in outcome.out
    assert (outcome.out + outcome.err).count("no file train-") == 1
    assert cells(outcome.out, "FedAvg")[:3] == ["failed", "97.31", "–"]
    assert "training images" not in outcome.out  # nobody knows how many they are


def test_a_card_says_what_one_must_know_to_read_it(potluck, tmp_path, runs):
    potluck("reproduce mine.toml --scale 0.01 --finished --card card.md --note 'Digits of another pen.'")
    card = (tmp_path / "card.md").read_text()
    run = read_run(next(runs.glob("2*")))
    for expected in (
        "# mine",
        "A paper: with a subtitle, Table 9: https://example.org",
        "1 seed; the paper has 5.",
        "rounds 20 → 2; clients 20 → 4",
        "- The paper is made up.",
        "- Local: Shares nothing.",
        "Note: Digits of another pen.",
        "`potluck reproduce mine.toml --scale 0.01 --seeds 1`",
        "4 of 4 runs finished, started 20",
        run.manifest["machine"],
        f"Potluck {run.manifest['packages']['potluck']}, commit {run.manifest['potluck_commit'][:12]}",
        f"digits {run.manifest['data_checksum'][:12]}",
    ):
        assert expected in card
    assert max(len(re.findall("\n# ", f"\n{card}")), 1) == 1


def test_a_card_names_each_commit_that_has_made_rounds_of_a_resumed_run(potluck, tmp_path, runs):
    place = next(runs.glob("2*")) / "manifest.json"
    manifest = json.loads(place.read_text())
    earlier = [{**manifest, "last_round": 1, "potluck_commit": "f" * 40, "potluck_dirty": False}]
    place.write_text(json.dumps({**manifest, "potluck_commit": "e" * 40, "potluck_dirty": False, "earlier": earlier}))
    potluck("reproduce mine.toml --scale 0.01 --finished --card card.md")
    assert f"{'f' * 12} to round 1, then {'e' * 12}" in (tmp_path / "card.md").read_text()


@pytest.mark.usefixtures("runs")
def test_a_cards_command_makes_the_same_part_of_the_table(potluck, tmp_path):
    part = "--scale 0.01 --seeds 1 --only 'Fed*' --columns IID"
    potluck(f"reproduce mine.toml {part} --finished --card card.md")
    assert f"`potluck reproduce mine.toml {part}`" in (tmp_path / "card.md").read_text()


@pytest.mark.slow
def test_a_failed_row_stops_nothing_and_stays_visible_and_the_rest_is_not_run_again(potluck, tmp_path, recipe):
    (tmp_path / "mine.toml").write_text(RECIPE + BROKEN)
    first = potluck(f"reproduce mine.toml {SMALL} --columns IID --card card.md")
    assert first.code == 1
    assert re.fullmatch(r"\d+\.\d", cells(first.out, "FedAvg")[0])
    for text in (first.out, (tmp_path / "card.md").read_text()):
        assert cells(text, "FedMD") == ["failed", "92.22", "–"]
        assert "Not finished: FedMD, iid, seed 0: " in text
        assert "public" in text
    folders = sorted((tmp_path / "runs" / "reproduce").glob("2*"))
    again = potluck(f"reproduce mine.toml {SMALL} --columns IID")
    assert sorted((tmp_path / "runs" / "reproduce").glob("2*")) == folders
    assert cells(again.out, "FedAvg") == cells(first.out, "FedAvg")
    assert cells(again.out, "FedMD") == ["failed", "92.22", "–"]


@pytest.mark.slow
@pytest.mark.usefixtures("recipe")
def test_interrupted_and_started_again_it_goes_on_and_ends_with_the_same_table(potluck, tmp_path):
    line = "reproduce mine.toml --columns IID --only FedAvg --processes 1 --scale 0.2 run.rounds=40"
    whole = potluck(f"{line} --runs whole")
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs are deaf
    command = [sys.executable, "-c", f"{heard}; from potluck.cli import main; main()", *line.split()]
    cut = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    began = time.monotonic()
    while not list((tmp_path / "runs" / "reproduce").glob("*/rounds.jsonl")) and time.monotonic() - began < 120:
        time.sleep(0.05)
    cut.send_signal(signal.SIGINT)
    assert cut.wait(timeout=120) == 130
    rest = potluck(line)
    assert len(list((tmp_path / "runs" / "reproduce").glob("*/manifest.json"))) == 1
    assert cells(rest.out, "FedAvg") == cells(whole.out, "FedAvg")
    assert (whole.code, rest.code) == (0, 0)


@pytest.mark.rotates
@pytest.mark.slow
@pytest.mark.usefixtures("on_noise")
@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_runs_at_its_smallest_scale_and_shows_ours_where_it_ran_and_nowhere_else(potluck, tmp_path, name):
    """The last row that can be run, in the first setting, on images of noise; the process is this one."""
    whole = load_recipe(name)
    setting = next(setting for _, setting in whole.cells())
    row = [row for row, of in whole.cells() if of == setting][-1]
    columns = [column for column in whole.columns if column.setting == setting]
    part = whole.part(glob.escape(row.name), glob.escape(columns[0].full_title))
    smaller = [few_images(whole), "method.training.epochs=1", "run.rounds=1"]
    smaller += ["run.cohort_fraction=0.1"] if "fedorion" in whole.methods else []  # whose networks are the largest
    run_here(plan(whole, 1e-6, 1, smaller, part), tmp_path / "runs" / "reproduce")
    outcome = potluck(f"reproduce {name} --scale 1e-6 {' '.join(smaller)} --finished --card card.md")
    assert outcome.code == 0
    assert " 1 of them finished" in outcome.out
    for text in (outcome.out, (tmp_path / "card.md").read_text()):
        shown = [(row.name, column, found) for row in whole.rows for column, found in ours(whole, text, row.name)]
        ran = [found for name, column, found in shown if name == row.name and column in columns]
        assert ran
        assert all(re.fullmatch(r"\d+(\.\d+)?|>\d+", found) for found in ran), ran
        assert {found for name, column, found in shown if not (name == row.name and column in columns)} <= {"–"}


def of_accuracies():
    """The recipes that compare an accuracy, or rounds to one, and not sizes alone."""
    recipes = map(load_recipe, list_recipes())
    return [r.name for r in recipes if not all(column.millions or column.states for column in r.columns)]


@pytest.mark.slow
@pytest.mark.usefixtures("on_noise")
@pytest.mark.parametrize("name", of_accuracies())
def test_every_row_has_the_accuracy_that_its_recipe_compares(name):
    """Of a method without a model of the server's, or a run without the common test set, hours would show nothing."""
    recipe, met = load_recipe(name), set()
    by = {row.name: recipe.by(row) for row in recipe.rows}
    for one in plan(recipe, 1e-6, 1, [few_images(recipe)]):
        if one.row in met:
            continue
        met.add(one.row)
        assert by[one.row] != "common" or one.experiment.run.common_test, one.row
        if by[one.row] == "global":
            engine = Engine(one.experiment.method, assemble(one.experiment).federation)
            assert engine.global_model(engine.start()) is not None, one.row


def ours(recipe, text, row):
    """What stands under ours in each column, in the printed tables or in those of a card."""
    lines = [line for line in text.splitlines() if re.match(rf"\|? ?{re.escape(row)} ( |\|)", line)]
    found = [cell for line in lines for cell in re.split(r"\s*\|\s*|\s{2,}", line.strip().strip("|").strip())[1:]]
    assert len(found) == 3 * len(recipe.columns), row
    return list(zip(recipe.columns, found[::3], strict=True))


@pytest.mark.slow
def test_a_recipe_of_a_figure_draws_it_of_its_finished_runs_by_itself(runs, potluck, tmp_path):
    (tmp_path / "mine.toml").write_text(
        RECIPE.replace("[measured]", "[analysis]\nclients = 3\nexamples = 40\nmap_class = 1\n\n[curves]\n\n[measured]")
    )
    outcome = potluck("reproduce mine.toml --scale 0.01 --finished --columns IID")
    assert "Figures: runs/reproduce/mine/analysis.html" in outcome.out
    assert "Curves: runs/reproduce/mine/report.html" in outcome.out
    assert (tmp_path / "runs/reproduce/mine/curves.png").is_file()
    place = tmp_path / "runs" / "reproduce" / "mine" / "analysis"
    assert {f"{name}.{kind}" for name in ("similarity", "gains", "map-1") for kind in ("svg", "pdf")} <= {
        path.name for path in place.iterdir()
    }
    with (place / "map.csv").open() as file:
        assert {row["label"] for row in csv.DictReader(file)} == {"1"}
    lines = (place / "similarity.csv").read_text().splitlines()
    assert {line.split(",")[0] for line in lines[1:]} == {"fedavg", "local"}  # of the column that was asked for
    again = potluck("reproduce mine.toml --scale 0.01 --finished --columns IID")
    assert "2 runs, 2 of them finished" in again.out  # the figures' folder is no run


def test_a_recipe_of_numbers_draws_nothing(runs, potluck, tmp_path):
    assert "Figures" not in potluck("reproduce mine.toml --scale 0.01 --finished").out
    assert not (tmp_path / "runs" / "reproduce" / "mine").exists()
