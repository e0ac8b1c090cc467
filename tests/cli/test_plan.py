import pytest

from potluck.cli.plan import bytes_of, print_plan
from potluck.core.ground.errors import ConfigError
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedepth import FeDepth
from potluck.models.preresnet import preresnet20


@pytest.fixture
def plan(monkeypatch, capsys):
    """Prints a plan and gives back its lines of cells."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*budgets, model="preresnet20", **options):
        print_plan(model, list(budgets), **options)
        lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
        return [[cell.strip() for cell in line[1:-1]] for line in lines]

    return run


def test_a_sixth_of_preresnet20_is_cut_as_in_the_paper(plan):
    rows = plan("1/6", num_classes=100)
    assert rows[0][1:4] == ["whole net", "stem to block9", "117.09 MiB"]
    assert [row[2] for row in rows[1:]] == [
        "stem to block1",
        "block2",
        "block3",
        "block4",
        "block5 to block6",
        "block7 to block9",
    ]
    assert [row[3] for row in rows[1:]] == ["20.02 MiB"] * 3 + ["14.05 MiB", "20.14 MiB", "17.78 MiB"]
    assert rows[1][0].startswith("1/6 = ")


def test_measured_pieces_take_less_than_the_whole_net_does(plan):
    whole, *pieces = [float(row[4].removesuffix(" MiB")) for row in plan("30MiB")]
    assert len(pieces) == 5
    assert max(pieces) < whole / 2


def test_measured_is_what_a_step_saves_and_the_parameters(plan):
    # With 4096 examples of 64 numbers one activation is 1 MiB. Each piece keeps its input and ReLU's output, the whole
    # net its input and three outputs; the 4160 parameters of a stage and the head's 650 take 0.018 MiB.
    rows = plan("5.2MiB", model="mlp3", input_shape=(64,), batch_size=4096)
    assert [row[4] for row in rows] == ["4.05 MiB", "2.02 MiB", "2.02 MiB", "2.02 MiB"]


def test_blocks_that_do_not_fit_are_named(plan):
    rows = plan("15MiB")
    assert rows[1] == ["15MiB = 15.00 MiB", "-", "stem to block3: not trained", "", ""]
    assert rows[2][:3] == ["", "1", "block4"]


def test_a_scenario_stands_for_its_four_shares(plan):
    firsts = [row[0] for row in plan("lack", batch_size=8) if row[0]]
    assert [first.split(" = ")[0] for first in firsts] == ["1/8", "1/6", "1/2", "1"]


def test_twice_the_batch_costs_more(plan):
    small, large = (float(plan(batch_size=n)[0][3].removesuffix(" MiB")) for n in (4, 8))
    assert small < large < 2 * small  # parameters do not double


def test_an_optimiser_counts_parameters_as_often_as_a_run_does(plan):
    # 1.03 MiB of parameters, three times more: gradients and two moments.
    once, often = (float(plan(optimizer=name)[0][3].removesuffix(" MiB")) for name in ("none", "adam"))
    training = LocalTraining("adam", batch_size=32)
    assert often == round(FeDepth(training).estimate(preresnet20(10, (3, 32, 32)), (3, 32, 32)).whole / 2**20, 2)
    assert often - once == pytest.approx(3 * 1.03, abs=0.02)
    with pytest.raises(ConfigError, match="--optimizer lion: expected one of none, sgd, momentum, adam"):
        plan(optimizer="lion")


def test_the_table_says_what_it_leaves_out(plan, capsys):
    print_plan("preresnet20", ["1/6"])
    told = " ".join(capsys.readouterr().out.split())
    assert "left out: the data, the whole network's weights (1.03 MiB a copy" in told


@pytest.mark.slow
def test_the_whole_net_takes_stem_norm_and_head_more_than_a_piece_of_all_its_blocks(plan, capsys):
    whole, piece = plan("fair")[0], plan("fair")[-1]
    assert (whole[3], piece[2], piece[3]) == ("117.05 MiB", "stem to block9", "112.02 MiB")
    # Outputs of the stem and of the last norm, then pooling and classifier, for 32 examples, twice, with parameters.
    stem, norm = (2 * 32 * size * 4 + 4 * p for size, p in ((16 * 32 * 32, 27 * 16), (64 * 8 * 8, 2 * 64)))
    head = 2 * 32 * (64 + 10) * 4 + 4 * 650
    assert (stem + norm + head) / 2**20 == pytest.approx(117.05 - 112.02, abs=0.01)
    print_plan("preresnet20", ["1/6"])
    told = " ".join(capsys.readouterr().out.split())
    assert "in which a piece counts its blocks, the whole net also stem, last norms and head" in told


def test_flat_inputs_are_planned(plan):
    rows = plan("1/2", model="mlp3", input_shape=(64,))
    assert [row[2] for row in rows] == ["stem to hidden2", "stem", "hidden1", "hidden2"]


@pytest.mark.parametrize(
    ("text", "count"),
    [("32MiB", 32 * 2**20), ("1.5GB", 1_500_000_000), ("7 kB", 7000), ("2KiB", 2048), ("1GiB", 2**30), ("12B", 12)],
)
def test_budgets_are_read_with_their_units(text, count):
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["32", "32MiBs", "32mb", "MiB", "-1MB", "0MB", "", "1/0", "fairly"])
def test_a_budget_without_a_known_unit_is_refused_on_one_line(plan, text):
    with pytest.raises(ConfigError, match="expected a number and a unit") as refused:
        plan(text)
    assert repr(text) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_budget_too_small_names_model_budget_and_the_smallest(plan):
    with pytest.raises(ConfigError, match=r"preresnet20 with 1MiB: budget of 1\.00 MiB.*at least 5\.29 MiB"):
        plan("1MiB")


def test_the_command_shows_pieces_and_refuses_what_is_no_shape(potluck):
    shown = potluck("plan preresnet20 1/6 --classes 100")
    assert shown.code == 0, shown.err
    assert "block7 to block9" in shown.out
    refused = potluck("plan preresnet20 1/6 --shape 32by32")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "expected sizes joined by x" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedepth", "mfedepth"])
def test_a_client_too_weak_for_any_piece_is_refused_before_the_run(potluck, tmp_path, method):
    outcome = potluck(f"run {method} 'federation.capacities=[1.0, 0.01]'")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "client 1, capacity 0.01 of cnn3(width=32): budget of" in outcome.err
    assert "expected at least" in outcome.err


@pytest.mark.parametrize("method", ["fedepth", "mfedepth"])
def test_a_bypass_without_a_way_is_refused_before_the_run(potluck, method):
    outcome = potluck(
        f"run {method} method.partial=bypass 'federation.capacities=[1.0, 0.2]'"
        " federation.models=\"[{name='cnn6',width=32}]\""
    )
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "client 1, capacity 0.2 of cnn6(width=32): partial: found 'bypass', but" in outcome.err


def test_without_budgets_it_is_the_fair_scenario(potluck):
    bare, fair = (potluck(f"plan cnn6 {budgets}") for budgets in ("", "fair"))
    assert bare.code == 0
    assert bare.out == fair.out
