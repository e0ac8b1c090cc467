import gc
import weakref

import pytest
import torch
from torch import nn

from potluck.core.ground.rng import fold_in
from potluck.core.requests.examples import Examples
from potluck.parts.activations import Buffer, outputs


class Double(nn.Module):
    """Remembers how many examples came together, in which mode, and what was alive of what it put out before."""

    def __init__(self):
        super().__init__()
        self.sizes, self.modes, self.made, self.alive = [], [], [], []

    def forward(self, x):
        gc.collect()
        self.alive.append(sum(one() is not None for one in self.made))
        self.sizes.append(len(x))
        self.modes.append((self.training, torch.is_grad_enabled()))
        found = 2 * x
        self.made.append(weakref.ref(found))
        return found


def examples(count=10, shape=(3, 2), dtype=torch.float32):
    values = torch.rand(count, *shape, generator=fold_in(0, "values").generator()).to(dtype)
    return Examples(values, torch.arange(count))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 2), (5,), (2, 3, 4), ()])
def test_rows_from_a_file_are_those_in_memory_in_whatever_order(dtype, shape):
    given = examples(shape=shape, dtype=dtype)
    order = torch.tensor([7, 0, 9, 0, 3])
    with Buffer(given) as in_file, Buffer(given) as in_memory:
        in_file.advance(Double(), 4, 4, in_memory=False)
        in_memory.advance(Double(), 4, 4, in_memory=True)
        for found in (in_file.examples, in_memory.examples):
            inputs, targets, _ = found.batch(order, augment=fold_in(0))
            assert torch.equal(inputs, 2 * given.inputs[order])
            assert inputs.dtype == dtype
            assert torch.equal(targets, order)
            assert len(found) == 10
            assert found.input_shape == shape
            assert torch.equal(found.labels, given.labels)


def test_what_comes_out_is_read_by_the_next_stages_and_the_file_before_is_closed():
    with Buffer(examples().take(torch.tensor([4, 2, 8]))) as z:
        z.advance(Double(), 2, 2, in_memory=False)
        first = z.examples
        z.advance(Double(), 2, 2, in_memory=False)
        with pytest.raises(ValueError, match="closed"):
            first.batch(torch.tensor([0]))
        inputs, targets, _ = z.examples.batch(torch.arange(3))
        assert torch.equal(inputs, 4 * examples().inputs[[4, 2, 8]])
        assert targets.tolist() == [4, 2, 8]
        last = z.examples
    with pytest.raises(ValueError, match="closed"):
        last.batch(torch.tensor([0]))


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [True, False])
def test_batches_pass_one_after_another_in_evaluation_mode_and_none_is_kept(in_memory):
    stage = Double().train()
    with Buffer(examples()) as z:
        z.advance(stage, 4, 4, in_memory=in_memory)
    assert stage.sizes == [4, 4, 2]
    assert set(stage.modes) == {(False, False)}
    assert stage.alive == [0, 0, 0]
    assert stage.training


def test_a_batch_passes_in_parts_where_memory_is_short():
    stage = Double()
    x = torch.rand(7, 3)
    assert torch.equal(outputs(stage, x, 3), 2 * x)
    assert stage.sizes == [3, 3, 1]
    assert stage.alive[1:] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["left", "failed"])
def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch, end):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        with Buffer(examples()) as z:
            z.advance(Double(), 4, 4, in_memory=False)
            if end == "failed":
                z.advance(nn.Linear(17, 1), 4, 4, in_memory=False)
    except RuntimeError:
        assert end == "failed"
    gc.collect()  # a file that was forgotten would warn, and warnings are errors
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_cut_is_an_error():
    with Buffer(examples()) as z:
        z.advance(Double(), 4, 4, in_memory=False)
        z.examples.preprocess.file.truncate(30)
        with pytest.raises(OSError, match="has been truncated"):
            z.examples.batch(torch.tensor([9]))
