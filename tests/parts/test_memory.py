from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.rng import Key, isolated
from potluck.core.requests.fit import LocalTraining
from potluck.models.contract import StagedNet
from potluck.models.preresnet import preresnet20
from potluck.models.vit import vit
from potluck.parts.memory import SCENARIOS, SLACK, MemoryModel, Piece, decompose, parameter_copies, saved_bytes

MB = 2**20
GB = 2**30


def table_1():
    return MemoryModel.of(preresnet20(100, (3, 32, 32)), (3, 32, 32))


def names(memory, budget):
    """The blocks of each piece, by their numbers in the paper."""
    return [list(range(max(piece.start, 1), piece.stop)) for piece in memory.pieces(budget)]


# The paper's numbers


def test_the_nine_blocks_of_preresnet20_cost_what_table_1_prints():
    printed = ["20.02"] * 3 + ["14.05"] + ["10.07"] * 2 + ["7.21"] + ["5.28"] * 2
    assert [f"{cost / MB:.2f}" for cost in table_1().costs] == printed


def test_the_five_widths_of_table_1_are_shares_of_the_nets_activations():
    whole = sum(part.activations for part in table_1().parts) / MB
    # Stem 4, blocks 111, last norm 1, pooling 64 and classifier 100 outputs for 32 examples, twice, of 4 bytes.
    assert whole == 4 + 111 + 1 + 2 * (64 + 100) * 32 * 4 / MB
    assert [f"{whole * share:.2f}" for share in (1 / 8, 1 / 6, 1 / 3, 1 / 2, 1)] == [
        "14.51",
        "19.34",
        "38.68",
        "58.02",
        "116.04",
    ]


@pytest.mark.parametrize("of", ["activations", "cost"])  # the paper's budgets, and those of capacities
@pytest.mark.parametrize(
    ("share", "pieces"),
    [
        (1 / 8, [[4], [5], [6], [7, 8], [9]]),
        (1 / 6, [[1], [2], [3], [4], [5, 6], [7, 8, 9]]),
        (1 / 3, [[1, 2], [3, 4], [5, 6, 7, 8, 9]]),
        (1 / 2, [[1, 2, 3], [4, 5, 6, 7, 8, 9]]),
        (1.0, [[1, 2, 3, 4, 5, 6, 7, 8, 9]]),
    ],
)
@pytest.mark.parametrize("classes", [10, 100])
def test_the_papers_budgets_give_its_five_decompositions(share, pieces, of, classes):
    memory = MemoryModel.of(preresnet20(classes, (3, 32, 32)), (3, 32, 32))
    whole = sum(getattr(part, of) for part in memory.parts)
    assert names(memory, SLACK * share * whole) == pieces


def test_without_tolerance_the_papers_budgets_do_not_hold_its_pieces():
    memory = table_1()
    assert names(memory, 19.34 * MB)[0] == [4]
    assert names(memory, 38.68 * MB)[0] == [1]


@pytest.mark.parametrize(("budget", "count"), [(3, [1, 2, 3]), (5, [2, 4])])
def test_figure_3(budget, count):
    costs = [cost * GB for cost in (3, 2, 1, 0.5, 0.5, 0.5)]
    assert [stop - start for start, stop in decompose(costs, budget * GB)] == count


def test_scenarios_are_those_of_the_paper():
    assert SCENARIOS["fair"] == (1 / 6, 1 / 3, 1 / 2, 1)
    assert SCENARIOS["lack"] == (1 / 8, 1 / 6, 1 / 2, 1)
    assert SCENARIOS["surplus"] == (1 / 6, 1 / 3, 1 / 2, 2)


# Decomposition


@pytest.mark.parametrize("budget", [5, 6, 7, 9, 14, 15, 30])
def test_pieces_fit_follow_one_another_and_cannot_take_the_next_block(budget):
    costs = [5, 1, 4, 2, 2, 1, 3]
    pieces = decompose(costs, budget)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == len(costs)
    for (start, stop), (following, _) in pairwise(pieces):
        assert stop == following
        assert sum(costs[start:stop]) <= budget < sum(costs[start : stop + 1])
    assert sum(costs[slice(*pieces[-1])]) <= budget


def test_blocks_before_one_that_does_not_fit_are_left_out_with_it():
    assert decompose([1, 5, 1, 2], 3) == [(2, 4)]


def test_a_budget_too_small_for_any_piece_names_the_smallest_that_works():
    with pytest.raises(ValueError, match=r"budget of 0\.50 MiB.*at least 1\.00 MiB.*or 3\.00 MiB to train every"):
        decompose([3 * MB, 2 * MB, MB], MB / 2)
    assert decompose([3 * MB, 2 * MB, MB], MB) == [(2, 3)]


def test_the_least_budget_that_an_error_names_is_enough():
    costs = [100_000, 300_001]
    with pytest.raises(ValueError, match=r"at least 0\.29 MiB, .* or 0\.29 MiB"):
        decompose(costs, 300_000)
    assert decompose(costs, 0.29 * 2**20) == [(0, 1), (1, 2)]


# Estimate


def flat(*widths, norm=False):
    stages = {
        f"s{i}": nn.Sequential(nn.Linear(a, b), *([nn.LayerNorm(b)] if norm else []))
        for i, (a, b) in enumerate(pairwise(widths))
    }
    return StagedNet(stages, nn.Linear(widths[-1], 2))


def test_the_estimate_is_parameters_and_twice_the_outputs_of_a_batch():
    memory = MemoryModel.of(flat(3, 5, 7), (3,), batch_size=10)
    assert [part.parameters for part in memory.parts] == [4 * (15 + 5), 4 * (35 + 7), 4 * (14 + 2)]
    # The pooling is a module and its seven outputs count, as in the paper's table.
    assert [part.activations for part in memory.parts] == [2 * 4 * 5 * 10, 2 * 4 * 7 * 10, 2 * 4 * (7 + 2) * 10]
    assert memory.whole == 4 * (20 + 42 + 16) + 2 * 4 * (5 + 7 + 7 + 2) * 10


def test_training_counts_parameters_as_often_as_the_optimiser_holds_them():
    # Adam: weights, gradients, two moments. SGD has a moment only where there is momentum.
    trainings = [LocalTraining("adam"), LocalTraining("sgd"), LocalTraining("sgd", momentum=0.9)]
    assert [parameter_copies(training) for training in trainings] == [4, 2, 3]
    once, often = (MemoryModel.of(flat(3, 5, 7), (3,), 10, copies) for copies in (1, 4))
    assert often.whole - once.whole == 3 * 4 * (20 + 42 + 16)
    assert often.parts[0].cost - once.parts[0].cost == 3 * 4 * 20


def test_to_train_a_piece_takes_its_stem_and_the_classifier_and_a_batch_too():
    memory = MemoryModel.of(flat(3, 1, 4, 2), (3,), 10, 2)  # a stem and two blocks
    piece = Piece(0, 2, memory.costs[0])
    parameters = 4 * (4 + 8 + 6)  # stem, first block, head
    activations = 2 * 4 * 10 * (1 + 4 + 2 + 2)  # pooling and head count as modules
    assert memory.blocks == ((0, 2), (2, 3))
    assert memory.held(piece) == 2 * parameters
    assert memory.training(piece) == 2 * parameters + activations + 4 * 10 * 3


def test_as_many_examples_pass_forward_together_as_there_is_room_for():
    memory = MemoryModel.of(flat(3, 5, 7), (3,), 10)
    # The batch's input of 3 and output of 7, and inside the second stage 5 and 7.
    assert memory.forward(2) == 4 * (3 + 7 + 5 + 7)
    assert [memory.at_once(2, room) for room in (0, 88, 3 * 88 + 1, 10**6)] == [1, 1, 3, 10]


@pytest.mark.parametrize("batch_size", [2, 500])
def test_what_a_block_is_depends_on_neither_batch_nor_optimiser(batch_size):
    net = flat(3, 1, 4)
    assert MemoryModel.of(net, (3,), batch_size, 4).blocks == MemoryModel.of(net, (3,)).blocks


def test_a_first_stage_of_half_the_seconds_cost_is_no_stem():
    # Costs in the paper's table are 4 (a b + b) + 256 b: 3 to 1 takes 272; then 528 from 1 to 2 and 792 from 1 to 3.
    assert [part.cost for part in MemoryModel.of(flat(3, 1, 2), (3,)).parts[:2]] == [272, 528]
    assert MemoryModel.of(flat(3, 1, 2), (3,)).blocks == ((0, 1), (1, 2))
    assert MemoryModel.of(flat(3, 1, 3), (3,)).parts[1].cost == 792
    assert MemoryModel.of(flat(3, 1, 3), (3,)).blocks == ((0, 2),)


def test_a_block_that_keeps_more_than_twice_its_outputs_counts_as_what_it_keeps():
    class Wasteful(nn.Module):  # torch keeps the argument of each sine, and no module puts one out
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            x = self.layer(x)
            for _ in range(5):
                x = x.sin()
            return x

    net = StagedNet({"one": nn.Linear(6, 6), "two": Wasteful(), "three": nn.Linear(6, 6)}, nn.Linear(6, 2))
    memory = MemoryModel.of(net, (6,), 10)
    # By hand, in outputs of six numbers: the batch, the block's input, five arguments, what comes out (which the head
    # keeps, and the pooling hands on), and two gradients; the logits besides, and the parameters of block and head.
    assert memory.step(Piece(1, 2, 0)) == 4 * 10 * (6 * (1 + 1 + 5 + 1 + 2) + 2) + 4 * (42 + 14)
    assert memory.costs[1] == memory.step(Piece(1, 2, 0)) > memory.parts[1].cost
    assert memory.pieces(memory.costs[1])[0].start == 0
    assert memory.pieces(memory.costs[1] - 1)[0].start == 2


def test_the_papers_blocks_keep_less_than_their_estimate():
    memory = table_1()
    assert all(memory.step(Piece(*block, 0)) < memory.parts[block[1] - 1].cost for block in memory.blocks)


def test_the_whole_net_is_one_piece_whatever_its_blocks_take():
    for net in (flat(3, 5, 5), flat(3, 5, 5, 5, norm=True)):
        memory = MemoryModel.of(net, (3,), 10, 4)
        assert [(piece.start, piece.stop) for piece in memory.pieces(memory.whole)] == [(0, len(net.stages))]


def test_norms_behind_the_last_block_belong_to_the_classifier():
    memory = MemoryModel.of(vit(2, (3, 8, 8), width=8, depth=3, heads=2), (3, 8, 8))
    assert [part.name for part in memory.parts][-2:] == ["norm", "head"]
    assert memory.after == 1
    assert memory.blocks == ((0, 2), (2, 3), (3, 4))
    assert memory.features == (5, 8)  # four patches and a class token


def test_a_stage_with_a_norm_and_another_layer_is_a_block():
    assert MemoryModel.of(flat(3, 5, 5, norm=True), (3,)).after == 0


def test_counting_leaves_the_net_as_it_was():
    net = preresnet20(10, (3, 8, 8), widths=(2, 2, 2)).train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    MemoryModel.of(net, (3, 8, 8))
    saved_bytes(net, torch.zeros(2, 3, 8, 8))
    assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert all(module.training for module in net.modules())
    assert not any(module._forward_hooks for module in net.modules())


# Measurement


def test_saved_bytes_of_linear_layers_are_their_inputs_and_what_relu_keeps():
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    # The first layer keeps its input; ReLU keeps its output, which is the second layer's input: one storage.
    assert saved_bytes(net, torch.zeros(10, 3)) == 4 * 10 * (3 + 5)


def test_a_storage_counts_once_however_many_operations_saved_it():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.one(x) + self.two(x.view(-1, 3))

    assert saved_bytes(Twice(), torch.zeros(10, 3)) == 4 * 10 * 3


def test_measuring_dropout_leaves_the_global_generator_alone(global_generator_unchanged):
    with isolated(Key(("net",))):
        net = nn.Sequential(nn.Linear(3, 4), nn.Dropout())
    assert saved_bytes(net, torch.zeros(10, 3)) > 4 * 10 * 3
