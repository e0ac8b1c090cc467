import pytest
import torch

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import (
    Form,
    by_name,
    count_of,
    each,
    first_of,
    joined_inputs,
    one_shape,
    positions_of,
    rows_of,
    shape_of,
    shown,
    sized,
    zeros,
)

IMAGE = torch.arange(24.0).reshape(2, 3, 2, 2)
NAMED = {"ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "age": torch.tensor([[0.5], [1.5]])}


def test_one_tensor_and_named_ones_are_read_alike():
    assert by_name(IMAGE) == {"": IMAGE}
    assert by_name(NAMED) is NAMED
    assert (count_of(IMAGE), count_of(NAMED)) == (2, 2)
    assert first_of(NAMED) is NAMED["ids"]
    assert each(IMAGE, torch.Tensor.sum) == IMAGE.sum()
    assert {name: int(x) for name, x in each(NAMED, torch.Tensor.sum).items()} == {"ids": 21, "age": 2}


def test_rows_of__takes_the_same_rows_of_every_tensor():
    last = rows_of(NAMED, torch.tensor([1]))
    assert (last["ids"].tolist(), last["age"].tolist()) == ([[4, 5, 6]], [[1.5]])
    assert rows_of(IMAGE[0], None).shape == (1, 3, 2, 2)


def test_joined_inputs__puts_batches_of_the_same_names_together():
    twice = joined_inputs([NAMED, NAMED], torch.stack)
    assert {name: x.shape for name, x in twice.items()} == {"ids": (2, 2, 3), "age": (2, 2, 1)}
    assert joined_inputs([IMAGE, IMAGE], torch.cat).shape == (4, 3, 2, 2)


def test_shape_of__says_types_of_named_inputs_which_are_needed_to_make_some():
    assert shape_of(IMAGE) == (3, 2, 2)
    shape = shape_of(NAMED)
    assert shape == {"ids": Form((3,), torch.int64), "age": Form((1,), torch.float32)}
    assert shown(shape) == "ids (3), age (1)"
    assert shown((3, 2, 2)) == "(3, 2, 2)"
    assert (positions_of(shape), positions_of((7, 2))) == (3, 7)
    made = sized(shape, 5, zeros)
    assert shape_of(made) == shape
    assert count_of(made) == 5
    assert sized((3, 2), 5, zeros).shape == (5, 3, 2)


def test_one_shape__refuses_named_inputs_in_one_line():
    assert one_shape([3, 2, 2]) == (3, 2, 2)
    with pytest.raises(ConfigError, match=r"^inputs ids \(3\), age \(1\); expected one tensor alone here"):
        one_shape(shape_of(NAMED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sized__one_tensor_is_of_the_type_that_networks_are_built_with(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert sized((3,), 2, zeros).dtype is torch.nn.Linear(3, 1).weight.dtype is dtype
    finally:
        torch.set_default_dtype(before)
