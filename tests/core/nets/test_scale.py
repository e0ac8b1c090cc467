import pytest
import torch
from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import Form
from potluck.core.nets.scale import FULL, Cuts, Scale, built
from potluck.core.nets.splitting import Splits


def test_of_rounds_up():
    assert [Scale(0.25).of(channels) for channels in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert FULL.of(7) == 7


def test_of_is_exact_where_the_product_is_a_whole_number():
    shares = [(width / 100, channels) for width in range(1, 101) for channels in (1, 7, 64, 100, 1000)]
    assert [Scale(share).of(n) for share, n in shares] == [-(-round(share * 100) * n // 100) for share, n in shares]
    assert Scale(0.07).of(100) == 7
    assert Scale(1e-12).of(5) == 1


@pytest.mark.parametrize("width", [0.0, -0.5, 1.01, float("nan")])
def test_scale_width_lies_between_zero_and_one(width):
    with pytest.raises(ConfigError, match=rf"^width {width:g}; expected a share of the channels, more than 0"):
        Scale(width)


@pytest.mark.parametrize("depth", [0, -1])
def test_scale_depth_is_at_least_one_block(depth):
    with pytest.raises(ConfigError, match=f"^depth {depth}; expected at least 1 block$"):
        Scale(depth=depth)


def test_built_calls_a_builder_of_the_full_net_without_arguments():
    assert isinstance(built(nn.ReLU, FULL, "net", Cuts(()), Splits((), True)), nn.ReLU)


@pytest.mark.parametrize(
    ("scale", "named"),
    [(Scale(depth=2), "depth 2"), (Scale(0.25, 3), "width 0.25 and depth 3")],
)
def test_built_says_of_a_builder_without_a_scale_what_it_cannot_make(scale, named):
    with pytest.raises(ConfigError, match=f"^small: cannot be built at {named}, since its builder takes no `scale`; c"):
        built(lambda: nn.ReLU(), scale, "small", Cuts((2,)), Splits((2,), True))


def test_built_hands_the_scale_to_a_builder_that_takes_anything():
    def build(**options):
        return nn.Linear(1, options["scale"].of(8))

    assert built(build, Scale(0.5), "net", Cuts(()), Splits((), True)).out_features == 4


class Named(nn.Module):
    """Reads two inputs by their names."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, a, b):
        return self.head((self.first(a) + self.second(b)).relu())


def test_a_network_of_named_inputs_is_made_narrower_as_others_are():
    shape = {"a": Form((6,), torch.float32), "b": Form((3,), torch.float32)}
    net = built(Named, Scale(0.5), "named", Cuts(shape), Splits(shape, True))
    assert net({"a": torch.zeros(2, 6), "b": torch.zeros(2, 3)}).shape == (2, 4)
    assert net.first.weight.shape == (4, 6)
