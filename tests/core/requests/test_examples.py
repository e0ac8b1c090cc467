import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ground.rng import Key
from potluck.core.requests.examples import Examples

INPUTS = torch.arange(10, dtype=torch.uint8).view(10, 1)
TARGETS = torch.arange(10) * 10


def noisy(inputs, rng):
    """Floats; shifted by a draw when augmenting."""
    shift = 0.0 if rng is None else 1 + torch.rand(len(inputs), 1, generator=rng)
    return inputs.float() + shift


@pytest.fixture
def examples():
    return Examples(INPUTS, TARGETS, noisy)


def at(*positions):
    return torch.tensor(positions)


def test_a_batch_holds_prepared_inputs_and_their_targets(examples):
    inputs, targets, _ = examples.batch(at(3, 0))
    assert inputs.tolist() == [[3.0], [0.0]]
    assert targets.tolist() == [30, 0]
    assert inputs.dtype == torch.float32


def test_without_preparation_inputs_are_as_stored():
    assert Examples(INPUTS, TARGETS).batch(at(3))[0].dtype == torch.uint8


@given(st.data())
def test_taking_from_what_was_taken_counts_among_the_taken(data):
    first = data.draw(st.lists(st.integers(0, 9), min_size=1))
    second = data.draw(st.lists(st.integers(0, len(first) - 1), min_size=1))
    taken = Examples(INPUTS, TARGETS).take(torch.tensor(first)).take(torch.tensor(second))
    expected = [first[position] for position in second]
    assert taken.batch(torch.arange(len(second)))[0].flatten().tolist() == expected
    assert taken.labels.tolist() == [10 * row for row in expected]
    assert len(taken) == len(second)


def test_taking_shares_storage_and_leaves_the_whole(examples):
    taken = examples.take(at(1, 2))
    assert taken.inputs is examples.inputs
    assert len(examples) == 10
    assert taken.preprocess is noisy


def test_rows_may_be_given_from_the_start():
    chosen = Examples(INPUTS, TARGETS, rows=at(7, 2))
    assert len(chosen) == 2
    assert chosen.labels.tolist() == [70, 20]
    assert chosen.batch(at(1))[0].item() == 2


def test_augmentation_follows_its_key(examples):
    plain = examples.batch(at(1, 2))[0]
    one, again, other = (examples.batch(at(1, 2), Key((k,)))[0] for k in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, plain)


@pytest.mark.usefixtures("global_generator_unchanged")
def test_augmentation_leaves_the_global_generator(examples):
    examples.batch(at(1), Key((1,)))


def test_unaugmented_examples_stay_so_whatever_is_done_with_them(examples):
    plain = examples.unaugmented()
    for again in (plain, plain.take(at(0, 5)), plain.with_columns(a=TARGETS), plain.unaugmented()):
        assert again.batch(at(1), Key((1,))).inputs.tolist() == [[5.0 if len(again) == 2 else 1.0]]
    assert examples.with_columns(a=TARGETS).batch(at(1), Key((1,))).inputs.tolist() != [[1.0]]
    assert Examples(INPUTS, TARGETS).unaugmented().batch(at(1), Key((1,))).inputs.tolist() == [[1]]


def test_columns_go_with_their_examples(examples):
    ranks = torch.arange(10).float()
    taken = examples.take(at(9, 4, 6)).with_columns(rank=ranks[:3])
    batch = taken.batch(at(2, 0))
    assert batch.inputs.tolist() == [[6.0], [9.0]]
    assert batch.targets.tolist() == [60, 90]
    assert batch.columns["rank"].tolist() == [2.0, 0.0]
    again = taken.take(at(2, 1)).with_columns(other=at(7, 8))
    assert {name: column.tolist() for name, column in again.batch(at(1)).columns.items()} == {
        "rank": [1.0],
        "other": [8],
    }
    assert again.take(at(1)).batch(at(0)).columns["other"].tolist() == [8]
    assert taken.with_columns(rank=ranks[3:6]).batch(at(0)).columns["rank"].tolist() == [3.0]
    assert [batch.columns["rank"].tolist() for batch in taken.batches(2)] == [[0.0, 1.0, 2.0]]
    assert examples.batch(at(1)).columns == {}


def test_a_column_has_one_row_an_example(examples):
    with pytest.raises(ValueError, match=r"^column 'rank': found 10 rows; expected 3, one for each example$"):
        examples.take(at(9, 4, 6)).with_columns(rank=torch.arange(10))
    with pytest.raises(ValueError, match=r"^column 'rank': found 3 rows; expected 2"):
        examples.take(at(9, 4, 6)).with_columns(rank=at(1, 2, 3)).take(at(0, 1)).with_columns(rank=at(1, 2, 3))


def test_examples_are_the_same_rows_whatever_is_known_of_them(examples):
    some = examples.take(at(1, 2))
    assert some.same_rows(some.unaugmented().with_columns(a=at(0, 0)))
    assert not some.same_rows(examples.take(at(1, 3)))
    assert not some.same_rows(examples)


def test_some_rows_and_what_was_computed_of_them_are_part_of_the_examples(examples):
    some, whole = examples.take(at(1, 2)), Examples(INPUTS, TARGETS)
    computed = some.with_inputs(torch.zeros(2, 7))
    for part in (some, some.take(at(1)), computed, computed.take(at(0)), computed.with_inputs(torch.zeros(2))):
        assert part.part_of(some)
        assert part.part_of(whole)
        assert not part.part_of(examples.take(at(1, 3)))
    assert not whole.part_of(some)
    assert not Examples(INPUTS.clone(), TARGETS).part_of(whole)
    assert torch.equal(computed.labels, some.labels)


def test_there_is_one_target_an_input(examples):
    with pytest.raises(ValueError, match=r"^10 inputs but 3 targets: give one target for each input$"):
        Examples(INPUTS, TARGETS[:3])


@given(st.integers(0, 10), st.integers(1, 12))
def test_batches_are_all_examples_in_order(count, size):
    rows = torch.arange(9, 9 - count, -1)
    batches = list(Examples(INPUTS, TARGETS, noisy, rows).batches(size))
    assert [row for inputs, _, _ in batches for row in inputs.flatten().tolist()] == rows.tolist()
    assert [label for _, targets, _ in batches for label in targets.tolist()] == (10 * rows).tolist()
    assert all(len(inputs) == size for inputs, _, _ in batches[:-1])


@given(st.integers(2, 10), st.integers(2, 12))
def test_a_last_batch_is_never_one_example(count, size):
    sizes = [len(targets) for _, targets, _ in Examples(INPUTS, TARGETS).take(torch.arange(count)).batches(size)]
    assert min(sizes) > 1
    assert max(sizes) <= size + 1


def test_examples_come_one_by_one_if_asked_for(examples):
    assert [len(targets) for _, targets, _ in examples.batches(1)] == [1] * 10


@pytest.mark.usefixtures("global_generator_unchanged")
def test_batches_may_be_shuffled_by_a_generator(examples):
    def order(seed):
        batches = examples.batches(4, shuffle=torch.Generator().manual_seed(seed))
        return [label for _, targets, _ in batches for label in targets.tolist()]

    assert sorted(order(1)) == TARGETS.tolist() != order(1)
    assert order(1) == order(1) != order(2)


def test_shuffled_inputs_keep_their_targets(examples):
    for inputs, targets, _ in examples.batches(3, shuffle=torch.Generator()):
        assert torch.equal(10 * inputs.flatten().long(), targets)


def test_the_input_shape_is_that_of_a_prepared_input():
    def prepare(inputs, rng):
        return inputs.float().view(-1, 1, 1).expand(-1, 3, 2)

    assert Examples(INPUTS, TARGETS, prepare).input_shape == (3, 2)
    assert Examples(INPUTS, TARGETS).input_shape == (1,)


def test_no_examples_have_an_input_shape_too(examples):
    assert examples.take(torch.empty(0, dtype=torch.int64)).input_shape == (1,)
