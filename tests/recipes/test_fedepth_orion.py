"""The recipes of FeDepth and FedORION: numbers agree with what the papers say of them, sizes with the text."""

import math
import re

import pytest

from potluck.models import get_model
from potluck.parts.exits import blocks_within
from potluck.parts.width import level_within
from potluck.recipes import list_recipes, load_recipe
from potluck.recipes.beside import plan

FEDORION = [name for name in list_recipes() if name.startswith("fedorion-")]
BUDGETS = ("Fair", "Lack", "Surplus")
# "The training order": FeDepth's text for 1/6, and what its authors' code does for the others.
PIECES = {
    0.125: ["4", "5", "6", "7 8", "9"],
    0.1667: ["1", "2", "3", "4", "5 6", "7 8 9"],
    0.3333: ["1 2", "3 4", "5 6 7 8 9"],
    0.5: ["1 2 3", "4 5 6 7 8 9"],
    1.0: ["1 2 3 4 5 6 7 8 9"],
}


def column(recipe, title):
    """By row, what the paper prints in a column."""
    wanted = next(one for one in recipe.columns if one.full_title == title)
    return {row.name: found.value for row in recipe.rows if (found := recipe.printed(row, wanted))}


def columns(recipe):
    """What the paper prints in each column, by row."""
    return {one.full_title: column(recipe, one.full_title) for one in recipe.columns}


def best(found):
    """The row with the largest number."""
    return max(found, key=found.__getitem__)


def full_size(recipe, row, setting):
    """The experiment of a row at full size."""
    return recipe.full_size(next(one for one in recipe.rows if one.name == row), setting)


@pytest.fixture(scope="module")
def fedepth():
    """FeDepth's Table 2."""
    return load_recipe("fedepth-table2")


def test_fedepth_every_cell_has_a_mean_and_a_spread_of_two_decimals(fedepth):
    assert (len(fedepth.rows), len(fedepth.columns)) == (15, 8)
    for row in fedepth.rows:
        assert all(re.fullmatch(r"\d\d\.\d\d ± \d\.\d\d", text) for text in row.paper), row.name


def test_fedepth_numbers_agree_with_the_sentences_of_the_text(fedepth):
    found = columns(fedepth)
    for title, numbers in found.items():
        for budget in BUDGETS:
            within = {name: value for name, value in numbers.items() if f"({budget})" in name}
            assert best(within) in {f"FeDepth ({budget})", f"m-FeDepth ({budget})"}, title
            if budget != "Surplus":
                assert min(within, key=within.__getitem__).startswith("FedAvg"), title
        for method in ("HeteroFL", "SplitMix", "DepthFL", "FeDepth", "m-FeDepth"):
            assert numbers[f"{method} (Fair)"] > numbers[f"{method} (Lack)"], (title, method)
        if title.startswith("CIFAR-10,"):
            assert best(numbers) == "FedAvg ×1", title
    # "5 % and more than 10 % improvements in top-1 accuracy on CIFAR-10 and CIFAR-100"
    ten, hundred = found["CIFAR-10, Dirichlet 1.0"], found["CIFAR-100, Dirichlet 1.0"]
    assert ten["m-FeDepth (Fair)"] - max(ten["HeteroFL (Fair)"], ten["SplitMix (Fair)"]) == pytest.approx(5.0, abs=0.05)
    assert hundred["m-FeDepth (Surplus)"] - max(hundred["HeteroFL (Fair)"], hundred["SplitMix (Fair)"]) > 10


@pytest.mark.parametrize(("dataset", "most"), [("CIFAR-10", 5.6), ("CIFAR-100", 7.8)])
def test_fedepth_gains_within_one_budget_are_those_that_the_deviation_names(fedepth, dataset, most):
    gains = []
    for title, numbers in columns(fedepth).items():
        for budget in BUDGETS[:2] if title.startswith(f"{dataset},") else ():
            within = {name: value for name, value in numbers.items() if f"({budget})" in name}
            ours = max(within.pop(f"{name} ({budget})") for name in ("FeDepth", "m-FeDepth"))
            gains.append(ours - max(within.values()))
    assert max(gains) == pytest.approx(most, abs=0.05)
    assert any(f"{most} points ({dataset})" in deviation for deviation in fedepth.deviations)


def test_fedepth_clients_train_the_pieces_of_the_paper(fedepth):
    """Each share of memory, in batches of 128, for 10 and 100 classes."""
    met = set()
    for row in ("FeDepth (Fair)", "FeDepth (Lack)", "m-FeDepth (Surplus)"):
        for setting, classes in (("cifar10-classes-2", 10), ("cifar100-classes-10", 100)):
            experiment = full_size(fedepth, row, setting)
            method = experiment.method
            memory = method.estimate(get_model(experiment.models[0].name)(classes, (3, 32, 32)), (3, 32, 32))
            for capacity in experiment.federation.capacities:
                pieces = memory.pieces(method.budget(capacity, memory))
                parts = [[part.name for part in memory.parts[piece.start : piece.stop]] for piece in pieces]
                trained = [" ".join(name[5:] for name in names if name.startswith("block")) for names in parts]
                assert trained == PIECES[capacity], (row, setting, capacity)
                met.add(capacity)
    assert met == set(PIECES)


@pytest.mark.parametrize(("row", "expected"), [("SplitMix (Fair)", [1, 2, 3, 6]), ("SplitMix (Lack)", [1, 1, 4, 8])])
def test_fedepth_splitmix_clients_train_as_many_base_networks_as_the_note_says(fedepth, row, expected):
    experiment = full_size(fedepth, row, "cifar10-classes-2")
    assert [experiment.method.budget(capacity) for capacity in experiment.federation.capacities] == expected


@pytest.mark.parametrize(("row", "expected"), [("DepthFL (Fair)", [1, 2, 3, 9]), ("DepthFL (Lack)", [1, 1, 3, 9])])
def test_fedepth_depthfl_clients_have_as_many_blocks_as_the_note_says(fedepth, row, expected):
    experiment, net = full_size(fedepth, row, "cifar10-classes-2"), get_model("preresnet20")(10, (3, 32, 32))
    levels = [level_within(experiment.method.levels, capacity) for capacity in experiment.federation.capacities]
    assert [blocks_within(net, level) for level in levels] == expected


def test_fedepth_figure_2_has_one_base_network_or_all_of_them():
    recipe = load_recipe("fedepth-figure2")
    for share in (2, 4, 8, 16):
        experiment = full_size(recipe, f"SplitMix {{1/{share}, 1}}", "cifar10")
        assert [experiment.method.budget(capacity) for capacity in experiment.federation.capacities] == [1, share]


@pytest.mark.parametrize(
    ("row", "counted"),
    [
        ("HeteroFL", [0.125, 0.25, 0.5, 1.0]),
        ("HeteroFL without 1/8", [0.25, 0.5, 1.0]),
        ("HeteroFL without 1", [0.125, 0.25, 0.5]),
        ("HeteroFL of full nets alone", [1.0]),
    ],
)
def test_fedepth_figure_2_counts_all_widths_but_those_that_a_row_is_without(row, counted):
    experiment = full_size(load_recipe("fedepth-figure2"), row, "cifar10")
    assert sorted(experiment.federation.capacities) == [0.125, 0.25, 0.5, 1.0]
    assert sorted(set(experiment.method.levels) - set(experiment.method.leave_out)) == counted


def test_fedorion_table_1_agrees_with_the_sentences_of_the_text():
    found = columns(load_recipe("fedorion-table1"))
    equal, alike, different = (found[f"CIFAR-10, {title}"] for title in ("Hom", "L-Het", "H-Het"))
    assert best(equal) == "FedDF"  # "shows a comparable performance"
    assert equal["FedDF"] - equal["FedORION"] < 0.71  # FedORION's spread
    assert best(alike) == best(different) == "FedORION"
    assert alike["FedORION"] < different["FedORION"]  # "somewhat less intuitive"
    for numbers in (alike, different):
        assert sorted(numbers, key=numbers.__getitem__)[-2] == "FedDF"  # "its most competitive baseline"


def test_fedorion_table_2_agrees_with_the_sentences_of_the_text():
    found = columns(load_recipe("fedorion-table2"))
    times = {}
    for title, numbers in found.items():
        assert best(numbers) == "FedORION", title
        rivals = {name: value for name, value in numbers.items() if name != "FedORION"}
        times[title] = best(rivals), numbers["FedORION"] / max(rivals.values())
    assert times["Tiny-ImageNet, 20 clients, β 0.6"] == ("FedMD", pytest.approx(3, abs=0.2))  # "almost three times"
    for skew in ("0.6", "0.1"):
        assert times[f"CIFAR-100, 20 clients, β {skew}"] == ("FedDF", pytest.approx(2, abs=0.25))  # "two times"
    ours = {title: numbers["FedORION"] for title, numbers in found.items()}
    assert ours["CIFAR-10, 100 clients, β 0.1"] < ours["CIFAR-10, 30 clients, β 0.1"]
    skewed = [ours[f"CIFAR-10, 30 clients, β {skew}"] for skew in ("0.6", "0.1", "0.01")]
    assert skewed == sorted(skewed)


def test_fedorion_ablations_agree_with_the_sentences_of_the_text():
    without = column(load_recipe("fedorion-table3-ablation"), "CIFAR-10, accuracy")
    assert sorted(without, key=without.__getitem__) == [
        "without aggregation",  # "the most critical phase"
        "without DML",
        "without distillation",
        "FedORION",
    ]
    noise = column(load_recipe("fedorion-table4-noise"), "CIFAR-10, accuracy")
    assert max(noise.values()) - min(noise.values()) < 2  # "a limited variation"
    homogeneous = column(load_recipe("fedorion-table3-homogeneous"), "CIFAR-10, accuracy")
    assert best(homogeneous) == "FedNTD"
    rivals = ("FedMD", "KT-pFL", "FedDF", "DS-FL", "FDmeta", "FedKEMF")
    assert homogeneous["FedORION"] > max(homogeneous[name] for name in rivals)


def test_fedorion_tables_agree_and_differ_where_the_recipes_say_so():
    first = columns(load_recipe("fedorion-table1"))
    second = columns(load_recipe("fedorion-table2"))
    models = columns(load_recipe("fedorion-table4-models"))
    noise = column(load_recipe("fedorion-table4-noise"), "CIFAR-10, accuracy")
    same = second["CIFAR-10, 30 clients, β 0.6"]["FedORION"]
    assert first["CIFAR-10, H-Het"]["FedORION"] == same == noise["GN"] == 84.2
    whole = column(load_recipe("fedorion-table3-ablation"), "CIFAR-10, accuracy")["FedORION"]
    assert whole == models["CIFAR-10"]["WRN40"] == 81.6
    titles = ("CIFAR-10, 30 clients, β 0.6", "CIFAR-100, 20 clients, β 0.6", "Tiny-ImageNet, 20 clients, β 0.6")
    assert [second[title]["FedORION"] for title in titles] == [84.2, 59.3, 43.2]
    assert [models[title.split(",")[0]]["WRN40"] for title in titles] == [81.6, 56.9, 40.8]
    homogeneous = column(load_recipe("fedorion-table3-homogeneous"), "CIFAR-10, accuracy")
    gaps = [abs(homogeneous[name] - value) for name, value in first["CIFAR-10, Hom"].items()]
    assert max(gaps) == pytest.approx(1.2)


@pytest.mark.slow
def test_fedorion_clients_drawn_each_round_are_those_of_the_text():
    """ "30 % of the randomly sampled clients" of 30, "10 randomly sampled clients" of 30 and 100, and "50 %" of 20."""
    sizes = {one.setting: (one.size.clients, one.size.cohort, one.size.rounds) for one in whole("fedorion-table2")}
    assert sizes.pop("tiny-imagenet-20-0.6") == (20, 10, 150)
    assert {(clients, cohort) for clients, cohort, _ in sizes.values()} == {(30, 10), (100, 10), (20, 10)}
    assert {rounds for _, _, rounds in sizes.values()} == {100}
    for name in FEDORION:
        assert {one.size.cohort for one in whole(name)} == {10}, name


def test_fedorion_one_number_of_the_paper_is_one_experiment():
    def experiment(name, row, setting):
        return full_size(load_recipe(name), row, setting).experiment_id

    selective = experiment("fedorion-table1", "FedORION", "h-het")
    assert selective == experiment("fedorion-table2", "FedORION", "cifar10-30-0.6")  # 84.2
    assert selective == experiment("fedorion-table4-noise", "GN", "cifar10")
    everyone = experiment("fedorion-table3-ablation", "FedORION", "cifar10")
    assert everyone == experiment("fedorion-table4-models", "WRN40", "cifar10")  # 81.6
    assert everyone == experiment("fedorion-figure3", "0 % without DML", "cifar10") != selective
    hundred = experiment("fedorion-table4-models", "WRN40", "cifar100")
    assert hundred == experiment("fedorion-figure3", "0 % without DML", "cifar100")
    assert hundred != experiment("fedorion-table2", "FedORION", "cifar100-20-0.6")  # 56.9 and 59.3


@pytest.mark.slow
def test_fedorion_ablations_and_other_global_models_have_every_client_learn_mutually():
    """Figure 6: "the FedORION algorithm" on the left, "with selective DML" on the right."""
    selective = {}
    for name in FEDORION:
        ours = [one.experiment.method for one in whole(name) if one.experiment.method_name == "fedorion"]
        selective[name] = {method.selective for method in ours}
    assert selective == {
        "fedorion-figure3": {True, False},
        "fedorion-table1": {True},
        "fedorion-table2": {True},
        "fedorion-table3-ablation": {False},
        "fedorion-table3-homogeneous": {True},
        "fedorion-table4-models": {False},
        "fedorion-table4-noise": {True},
    }


@pytest.mark.slow
def test_fedorion_clients_draw_their_architectures():
    """ "Each client is randomly assigned one of the considered models"."""
    for name in FEDORION:
        for one in whole(name):
            assert one.experiment.federation.dealing == "random" or len(one.experiment.models) == 1, one.name


def test_fedorion_global_models_are_wrn40_but_for_fedorions_where_nobody_holds_it():
    """ "Unless specified, we use WRN40"; "DML in case of L-Het is not performed at the clients having Resnet20"."""
    for one in whole("fedorion-table1"):
        if one.row in ("DS-FL", "FDmeta", "FedKEMF", "FedORION"):
            small = (one.row, one.setting) == ("FedORION", "l-het")
            assert one.experiment.server_model.name == ("resnet20" if small else "wrn40_1"), one.name


def whole(name):
    """The runs of a recipe at full size."""
    return plan(load_recipe(name), 1.0, 1)


def test_fedorion_rivals_learn_from_all_public_images_as_long_as_the_server_does():
    for one in whole("fedorion-table2"):
        if one.experiment.method_name == "feddf":
            training = one.experiment.method.server_training
            assert training.steps == 5 * math.ceil(50_000 / training.batch_size)
            assert training.clip_norm == 5  # FedDF's own
        if one.experiment.method_name in ("dsfl", "fedkemf", "fedmd", "ktpfl"):
            assert one.experiment.method.public_examples == 50_000
        assert (one.experiment.federation.public == "none") == (one.experiment.method_name == "fedorion")


def test_fedorion_figure_3_has_the_shares_of_its_rows_in_both_columns():
    rows = [one.row for one in whole("fedorion-figure3") if one.setting == "cifar10"]
    assert "53 % without DML" in rows  # "the best performance"
    for one in whole("fedorion-figure3"):
        federation, method = one.experiment.federation, one.experiment.method
        capacities = [federation.capacities[k % len(federation.capacities)] for k in range(federation.clients)]
        weak = [capacity < method.mutual_from for capacity in capacities]
        assert sum(weak) == round(int(one.row.split()[0]) / 100 * federation.clients), one.name
        assert one.experiment.server_model.name == "wrn40_1"
        others = {"resnet18", "resnet34", "shufflenetv2", "mobilenetv2"}
        names = {model.name for model in one.experiment.models}
        assert names == (others if method.selective else {*others, "wrn40_1"}), one.name
        assert method.selective == (sum(weak) > 0)


def test_fedorion_methods_without_a_model_of_the_server_are_measured_by_their_clients_models():
    """`run.common_test` is what measures these."""
    for name in ("fedorion-table1", "fedorion-table2", "fedorion-table3-homogeneous"):
        recipe = load_recipe(name)
        by = {row.name: recipe.by(row) for row in recipe.rows}
        assert {row for row, measure in by.items() if measure == "common"} == {"FedMD", "KT-pFL"}
        for one in whole(name):
            assert one.experiment.run.common_test == (by[one.row] == "common")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedorion-table1", "fedorion-table2", "fedorion-table3-homogeneous"])
def test_fedorion_rivals_have_enough_public_images_for_batchnorm_at_the_smallest_scale(name):
    methods = [one.experiment.method for one in plan(load_recipe(name), 1e-6, 1)]
    counts = [method.public_examples for method in methods if hasattr(method, "public_examples")]
    assert counts
    assert min(counts) >= 2
