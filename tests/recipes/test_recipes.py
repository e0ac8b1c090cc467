"""The recipes that come with Potluck: they load, resolve at full size, and hold what the papers print."""

import math
import tomllib
from dataclasses import replace
from importlib.resources import files

import pytest
from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.data.datasets import list_datasets
from potluck.methods import list_methods
from potluck.models import get_model
from potluck.recipes import list_recipes, load_recipe
from potluck.recipes.beside import plan
from potluck.recipes.contents import read_recipe
from potluck.recipes.scaling import size_of

SMALLEST = 1e-6
# The speed-ups that the arXiv text of FedIN prints beside rounds, which the recipes do not hold.
SPEED_UPS = {
    "fedin-arxiv-table1": [1.0, 1.2, 1.9, 1.3, 1.4, 0.3, 1.5, 2.4],
    "fedin-arxiv-table2": [1.0, 1.8, 1.1, 0.8, 1.5, 0.8, 1.2, 2.8],
    "fedin-arxiv-table3": [1.0, 1.5, 0.9, 0.5, 0.8, 0.4, 0.7, 2.0],
}


@pytest.fixture(params=list_recipes())
def recipe(request):
    """Every recipe."""
    return load_recipe(request.param)


def column(recipe, title):
    """By row, what the paper prints in a column."""
    wanted = next(one for one in recipe.columns if one.full_title == title)
    return {row.name: found.value for row in recipe.rows if (found := recipe.printed(row, wanted))}


@pytest.mark.slow
@pytest.mark.rotates
def test_every_row_resolves_at_full_size_and_is_the_papers(recipe):
    for planned in plan(recipe, 1.0, 1):
        assert planned.experiment.experiment_id, planned.name
        assert planned.size == planned.full


@pytest.mark.slow
@pytest.mark.rotates
def test_every_row_of_a_setting_has_the_same_clients_at_the_smallest_scale_and_all_kinds_of_them(recipe):
    sizes = {}
    for planned in plan(recipe, SMALLEST, 1):
        federation = planned.experiment.federation
        sizes.setdefault(planned.setting, set()).add((planned.size.clients, planned.size.cohort, planned.size.images))
        kinds = max(len(planned.experiment.models), len(federation.capacities))
        assert planned.size.clients >= kinds, planned.name
        assert planned.size.rounds <= 2
    assert all(len(found) == 1 for found in sizes.values()), sizes


@pytest.mark.slow
@pytest.mark.rotates
def test_rows_of_a_setting_differ_in_what_is_run(recipe):
    """Two rows that are the same experiment would be one run with two names."""
    ids = {}
    for planned in plan(recipe, 1.0, 1):
        ids.setdefault((planned.setting, planned.experiment.experiment_id), []).append(planned.row)
    assert not [rows for rows in ids.values() if len(rows) > 1]


def test_a_recipe_names_methods_and_data_sets_that_exist(recipe):
    assert recipe.methods
    assert set(recipe.methods) <= set(list_methods())
    assert recipe.datasets
    assert set(recipe.datasets) <= set(list_datasets())


def test_a_recipe_says_where_its_numbers_are_from_and_what_is_not_the_same(recipe):
    assert recipe.paper.url.startswith("https://")
    assert recipe.deviations
    sentences = [*recipe.deviations, *(row.note for row in recipe.rows if row.note)]
    assert not [text for text in sentences if not text.endswith(".")]


def test_scores_are_percent_and_rounds_are_within_the_run(recipe):
    for row in recipe.rows:
        for one in recipe.columns:
            printed = recipe.printed(row, one)
            if printed is None or one.millions or one.states:
                continue
            rounds = recipe.experiment["run"] | recipe.settings[one.setting].run
            assert 0 < printed.value <= (rounds["rounds"] if one.rounds_to else 100), (row.name, one.full_title)
            assert printed.spread is None or printed.spread < 20


@pytest.mark.parametrize(("name", "speed_ups"), SPEED_UPS.items())
def test_rounds_to_a_target_give_the_speed_ups_that_the_paper_prints(name, speed_ups):
    recipe = load_recipe(name)
    rounds = column(recipe, next(one.full_title for one in recipe.columns if one.rounds_to))
    found = [rounds["FedAvg"] / of for of in rounds.values()]
    assert found == pytest.approx(speed_ups, abs=0.0501)


def test_fedin_arxiv_tables_agree_with_the_sentences_of_the_text():
    fashion, cifar = load_recipe("fedin-arxiv-table1"), load_recipe("fedin-arxiv-table3")
    assert column(fashion, "IID")["FedIN"] == 91.2
    assert column(fashion, "non-IID")["FedIN"] == 90.3
    iid, skewed = column(cifar, "IID"), column(cifar, "non-IID")
    assert (iid["FedProx"], skewed["FedProx"]) == (77.6, 72.0)
    assert (iid["HeteroFL"], skewed["HeteroFL"]) == (72.1, 61.0)
    assert (iid["InclusiveFL"], skewed["InclusiveFL"]) == (75.0, 66.1)
    for found in (iid, skewed):
        best, second, *_ = sorted(found, key=found.__getitem__, reverse=True)
        assert best == "FedIN"
        assert second == ("Scaffold" if found is iid else "FedProx")
    one = load_recipe("fedin-arxiv-table4")
    assert max(column(one, "IID").values()) == column(one, "IID")["FedIN"] == 84.7
    assert sorted(column(one, "non-IID").values())[-2:] == [78.2, 79.2]
    ablation = column(load_recipe("fedin-arxiv-table7"), "non-IID")
    assert ablation["FedIN"] - ablation["FedIN w/o Opt"] == pytest.approx(1.0)  # "an improvement of 1 %"


def test_fedin_revised_tables_agree_with_the_sentences_of_the_text():
    """FedIN with noise leads everywhere but on SVHN with IID data, where HeteroFL does."""
    table = load_recipe("fedin-table1")
    for title in (
        "Fashion-MNIST, IID",
        "Fashion-MNIST, non-IID",
        "CIFAR-10, IID",
        "CIFAR-10, non-IID",
        "SVHN, non-IID",
    ):
        found = column(table, title)
        assert max(found, key=found.__getitem__) == "FedIN (+Noise)", title
    found = column(table, "SVHN, IID")
    assert found["HeteroFL"] > found["FedIN (+Noise)"]
    for title in ("Fashion-MNIST", "SVHN", "CIFAR-10", "CINIC-10"):
        rounds = next(one.full_title for one in table.columns if one.group == title and one.rounds_to)
        found = column(table, rounds)
        assert sorted(found, key=found.__getitem__)[:2] == ["FedIN (+Noise)", "FedIN"], title
    fourth = load_recipe("fedin-table4")
    assert (column(fourth, "IID")["FedIN"], column(fourth, "non-IID")["FedIN"]) == (88.9, 88.0)
    assert len(table.rows) == 15 + 2  # "We have 15 baselines"


def test_tables_of_both_versions_agree_where_the_revision_repeats_the_arxiv_text():
    revised = load_recipe("fedin-table1")
    for name, group in (("1", "Fashion-MNIST"), ("2", "SVHN"), ("3", "CIFAR-10")):
        arxiv = load_recipe(f"fedin-arxiv-table{name}")
        for title in ("IID", next(one.title for one in arxiv.columns if one.rounds_to)):
            theirs = column(revised, f"{group}, {title}")
            assert column(arxiv, title).items() <= theirs.items(), (group, title)


def test_recipes_with_the_augmentation_of_incos_code_have_it_on_cifar_10():
    """It cuts out a square, which is not usual for this data set."""
    citing = [
        one for one in map(load_recipe, list_recipes()) if "of InCo's code; the paper" in " ".join(one.deviations)
    ]
    found = [
        recipe.full_size(row, setting).federation
        for recipe in citing
        for row, setting in recipe.cells()
        if recipe.settings[setting].federation["dataset"] == "cifar10"
    ]
    assert len(found) > 100
    assert {federation.augmentation for federation in found} == {("crop", "flip", "cutout")}


def test_the_claims_of_fedin_are_put_to_the_test_in_the_setting_of_its_table_1_but_for_the_size():
    table, claims = load_recipe("fedin-table1"), load_recipe("claims-fedin")
    for name in ("FedAvg", "FedProx", "FedIN", "FedIN (+Noise)"):
        theirs, ours = (
            recipe.full_size(next(row for row in recipe.rows if row.name == name), "cifar10")
            for recipe in (table, claims)
        )
        assert ours.method.training == theirs.method.training
        assert (ours.partition, ours.method_name) == (theirs.partition, theirs.method_name)
        assert replace(ours.run, evaluate_every=1) == theirs.run
        assert [spec.name for spec in ours.models] == [spec.name for spec in theirs.models]
        shrunk = {"image_size": 16, "train_fraction": 0.2, "models": ours.federation.models}
        assert replace(theirs.federation, **shrunk) == ours.federation


REVISED = ("fedin-table1", "fedin-table3", "fedin-table4", "fedin-table6", "fedin-table7", "fedin-figure6")
ARXIV = tuple(name for name in list_recipes() if name.startswith("fedin-arxiv-"))


def sent_statistics(name):
    """By row, what becomes of BatchNorm's statistics, of the methods that have such an option."""
    recipe = load_recipe(name)
    methods = {row.name: recipe.full_size(row, setting).method for row, setting in recipe.cells()}
    return {row: method.sharing.buffers for row, method in methods.items() if hasattr(method, "sharing")}


@pytest.mark.parametrize("name", REVISED)
def test_fedin_revised_clients_keep_the_statistics_that_it_calls_unnecessary_to_transmit(name):
    found = sent_statistics(name)
    assert found.pop("FedET", "average") == "average"  # its server predicts with clients' models
    assert set(found.values()) == {"local"}
    assert "FedIN" in found or "FedIN, batches of 16" in found
    said = " ".join(load_recipe(name).deviations)
    assert '"unnecessary to transmit to the server"' in said
    assert "does not mention" not in said


@pytest.mark.parametrize("name", ARXIV)
def test_fedin_arxiv_clients_average_the_statistics_of_which_it_says_nothing(name):
    assert set(sent_statistics(name).values()) == {"average"}
    said = " ".join(load_recipe(name).deviations)
    assert "averaged like weights; the paper does not mention them" in said or "seems to leave out" in said


def test_fedin_table_3_counts_parameters_and_no_statistics():
    recipe = load_recipe("fedin-table3")
    nets = [get_model(name)(10, (3, 32, 32)) for name in recipe.experiment["federation"]["models"]]
    parameters, statistics = (
        sum(tensor.numel() for net in nets for tensor in of(net)) / len(nets) / 1e6
        for of in (nn.Module.parameters, nn.Module.buffers)
    )
    printed = column(recipe, "millions")
    assert printed["FedAvg"] == math.floor(100 * parameters) / 100 == 12.28
    assert printed["Scaffold"] == pytest.approx(2 * printed["FedAvg"])
    assert math.floor(100 * (parameters + statistics)) / 100 == 12.29


def test_fedin_table_3_counts_memory_as_whole_mebibytes_of_five_models():
    recipe = load_recipe("fedin-table3")
    nets = [get_model(name)(10, (3, 32, 32)) for name in recipe.experiment["federation"]["models"]]
    whole = [round(sum(tensor.numel() for tensor in net.parameters()) * 4 / 2**20) for net in nets]
    assert whole == [19, 41, 43, 65, 67]
    features = 16 * (64 * 8 * 8 + 512) * 4 / 2**20
    for row in recipe.rows:
        held = sum(sum(whole) if one == "model" else features for one in row.holds)
        printed = recipe.printed(row, recipe.columns[-1])
        assert f"{held:.1f}" == printed.text or not row.holds, row.name
    assert [row.name for row in recipe.rows if not row.holds] == ["HeteroFL", "FedRolex", "ScaleFL"]


@pytest.mark.parametrize("name", [name for name in (*REVISED, *ARXIV) if "heterofl" in load_recipe(name).methods])
def test_fedin_rivals_that_cut_widths_draw_them_in_every_round_as_its_dynamic_mode_does(name):
    recipe = load_recipe(name)
    counts = all(
        one.millions or one.states for one in recipe.columns
    )  # the mean of a draw cannot be counted in one round
    for row in recipe.rows:
        if row.method["name"] in ("heterofl", "fedrolex", "scalefl"):
            method = recipe.full_size(row, next(iter(recipe.settings))).method
            assert method.assignment == ("capacity" if counts else "dynamic"), row.name
            if row.method["name"] != "scalefl":
                assert method.levels == (1.0, 0.5, 0.25, 0.125, 0.0625), row.name
    assert '"dynamic_a1-b1-c1-d1-e1"' in next(row.note for row in recipe.rows if row.name == "HeteroFL")


def test_fedin_table_7_has_growing_noise_and_the_papers_words_for_its_missing_numbers():
    recipe, first = load_recipe("fedin-table7"), load_recipe("fedin-table1")
    assert not any(text for row in recipe.rows for text in row.paper)
    assert "at +0.8σ (the setting of FedIN (+Noise)), obtain superior performance" in recipe.measured.words
    assert "as noise levels exceed +1.0σ, there is a noticeable decline in accuracy across all datasets" in (
        recipe.measured.words
    )
    experiments = {row.name: recipe.full_size(row, "svhn") for row in recipe.rows}
    levels = [one.method.noise for one in experiments.values()]
    assert levels == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    assert set(recipe.datasets) == set(first.datasets) == {"fashion_mnist", "svhn", "cifar10", "cinic10"}
    theirs = {row.name: first.full_size(row, "svhn").experiment_id for row in first.rows}
    assert experiments["FedIN"].experiment_id == theirs["FedIN"]
    assert experiments["FedIN (+0.8σ)"].experiment_id == theirs["FedIN (+Noise)"]


def test_fedin_recipes_name_the_tables_and_figures_of_the_other_text_that_they_stand_for():
    figures = {name: " ".join(load_recipe(name).figures) for name in list_recipes()}
    assert "Table 5a of the revision" in figures["fedin-arxiv-table4"]
    for place in ("Figure 9 of the revision", "Table 5b of the revision"):
        assert place in figures["fedin-arxiv-table7"]
    assert "Figure 9 of the arXiv version" in figures["fedin-figure6"]
    words = load_recipe("fedin-figure6").measured.words
    assert "even with a sample number of 1, there is a significant improvement compared to the baselines" in words


def test_a_number_in_a_file_is_shown_as_the_paper_prints_it():
    recipe = load_recipe("fedin-table1")
    row = next(row for row in recipe.rows if row.name == "InCoAvg")
    assert [recipe.printed(row, one).text for one in recipe.columns[3:5]] == ["90", "87.4 ± 1.8"]
    assert recipe.printed(row, recipe.columns[4]).spread == 1.8


def test_an_unknown_recipe_is_refused_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"unknown recipe 'fedin-tabel1'; nearest: .*fedin-table1.*potluck reproduce"):
        load_recipe("fedin-tabel1")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            'title = "10 clients"',
            'title = "10 clients"\nround_to = 5',
            "unknown key recipe.columns.0.round_to; nearest: .*columns.0.rounds_to",
        ),
        ('"79.3"', '"79.3 +- 1"', "rows.paper of FedAvg: expected numbers such as"),
        ('"79.3", ', "", "rows.paper of FedAvg: expected 10 numbers, one for each column, found 9"),
        ('setting = "iid-10"', 'setting = "iid-11"', "columns.setting: expected one of iid-10"),
        ('name = "InclusiveFL"', 'name = "FedAvg"', "rows.name: expected different names"),
        ('by = "common"', 'by = "best"', "recipe.measured.by"),
        (
            '[measured]\nby = "common"',
            '[analysis]\n\n[measured]\nby = "global"',
            "measured.by: expected one of personal, common, validation, since",
        ),
        (
            'method = { name = "fedin"',
            'methods = { name = "fedin"',
            "unknown key recipe.rows.2.methods; nearest: .*method",
        ),
        (
            'method = { name = "fedin", mu = 0.1, sharing.buffers = "local" }',
            "",
            "row FedIN: expected either a method, or in `missing` why",
        ),
    ],
)
def test_a_recipe_with_a_mistake_is_refused_and_the_error_names_it(before, after, expected):
    text = (files("potluck.recipes") / "fedin-table6.toml").read_text()
    assert before in text
    with pytest.raises(ConfigError, match=f"mine.toml: .*{expected}"):
        read_recipe(tomllib.loads(text.replace(before, after, 1)), "mine", "mine.toml")


def test_size_of_a_full_run_is_what_the_paper_states():
    recipe = load_recipe("fedin-table1")
    size = size_of(recipe.full_size(recipe.rows[0], "cifar10"), recipe.settings["cifar10"].images)
    assert (size.rounds, size.clients, size.cohort, size.images) == (500, 100, 10, 50_000)
    assert size.words == "500 rounds, 10 of 100 clients in each, 50,000 training images (500 for each client)"
