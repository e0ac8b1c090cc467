"""Nets that read texts: heads at every token of which one is picked, and masks that are read by every layer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck import ConfigError, Examples, Federation, Run, RunConfig, Site, fl, get_method
from potluck.core.ground.tree import unpack
from potluck.core.nets.splitting import plan_of
from potluck.models.fitting import FeatureFit, fitted
from potluck.testing.worlds import packed_state, quick

WORDS, LENGTH, WIDTH = 20, 7, 8
pytestmark = pytest.mark.filterwarnings("ignore:num_classes is 3, and no example has")
READING = ("fedproto", "fedgh", "fedgen", "fedl2g", "lgfedavg", "moon", "felo", "fedmrl", "fedkd", "fedper", "fml")
GOING_ON = ("fedin", "fedgkt", "fedmlb")


class Block(nn.Module):
    """Attention to what came before, written by hand."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out, self.wide = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + F.dropout(self.wide(x).relu(), 0.1, self.training)


class Text(nn.Module):
    """A small GPT; 0 is padding. What becomes of the tokens is told apart by classes."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.score = nn.Linear(WIDTH, 3, bias=False)

    def tokens(self, ids):
        x = self.embed(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def last(self, ids):
        return torch.arange(len(ids)), ((ids != 0) * torch.arange(ids.shape[1])).argmax(-1)


class Picks(Text):
    """Its head is applied to all tokens, and the last is picked that is no padding."""

    def forward(self, ids):
        return self.score(self.tokens(ids))[self.last(ids)]


class PicksBefore(Text):
    """The same, written so that the head reads one token."""

    def forward(self, ids):
        return self.score(self.tokens(ids)[self.last(ids)])


class PicksFirst(Text):
    """Always the same token."""

    def forward(self, ids):
        return self.score(self.tokens(ids))[:, 2]


class Averages(Text):
    """The mean of what the head says of every token."""

    def forward(self, ids):
        return self.score(self.tokens(ids)).mean(1)


class Masked(Text):
    """A mean of the tokens that are no padding, as encoders of sentences have it."""

    def forward(self, ids):
        mask = (ids != 0).unsqueeze(-1)
        return self.score((self.tokens(ids) * mask).sum(1) / mask.sum(1).clamp(min=1))


def federation(build):
    def examples(count):
        ids = torch.randint(1, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(count))
        lengths = 2 + torch.arange(count) % (LENGTH - 1)
        return Examples(ids * (torch.arange(LENGTH) < lengths[:, None]), (ids[:, 0] > 9).long())

    sites = {i: Site(i, "text", examples(20 + i), examples(8), examples(9)) for i in range(2)}
    return Federation(sites, {"text": build}, "text", num_classes=3, public=examples(12))


def made(build):
    return federation(build).build("text", fl.Key(("text",))).eval()


def left_by(name, build):
    """The tensors of the server's state and of the clients' models after a round."""
    run = Run(quick(get_method(name)), federation(build), RunConfig(rounds=1, executor="sequential"))
    run.run()
    trained = run.trained()
    models = [dict(trained.model(client).state_dict()) for client in trained.federation.sites]
    return unpack(packed_state(trained.state)), models


@pytest.mark.slow
@pytest.mark.usefixtures("in_double_precision")  # Adam's first steps make much of how a gradient near 0 is rounded
@pytest.mark.parametrize("name", READING)
def test_a_head_at_every_token_leaves_behind_what_one_at_the_picked_token_leaves(name):
    (state, models), (expected, others) = left_by(name, Picks), left_by(name, PicksBefore)
    _assert_close(state, expected)
    _assert_close(models, others)


def _assert_close(found, expected):
    if isinstance(expected, torch.Tensor):
        assert_close(found, expected, rtol=2e-3, atol=2e-4)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            _assert_close(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            _assert_close(one, other)


@pytest.mark.parametrize("build", [Picks, PicksFirst])
@pytest.mark.parametrize("training", [False, True])
def test_features_are_what_the_head_reads_at_the_picked_token(build, training):
    net = made(build).train(training)
    parts, ids = fl.split(net), federation(build).sites[0].train.inputs
    at = net.last(ids) if build is Picks else (torch.arange(len(ids)), torch.full((len(ids),), 2))
    torch.manual_seed(1)
    expected = net.tokens(ids)[at]
    torch.manual_seed(1)
    outputs = net(ids)
    torch.manual_seed(1)
    passed = parts.passed(ids)
    assert torch.equal(passed.s_out, expected)
    assert torch.equal(passed.outputs, outputs)
    assert_close(parts.classifier(passed.s_out), outputs)
    assert (parts.num_features, parts.head_name, parts.head_problem()) == (WIDTH, "score", None)
    assert parts.feature_shapes((LENGTH,)) == (torch.Size([LENGTH, WIDTH]), torch.Size([WIDTH]))
    torch.manual_seed(1)
    assert torch.equal(parts.features(ids), expected)


def test_a_token_that_is_always_the_same_is_picked_of_features_that_are_given_too():
    net = made(PicksFirst)
    parts, ids = fl.split(net), federation(PicksFirst).sites[0].train.inputs
    s_in, s_out, _ = parts.passed(ids)
    assert_close(parts.intermediate(s_in), s_out)


@pytest.mark.parametrize("build", [Picks, Masked])
def test_texts_whose_inputs_are_read_again_are_split_for_methods_that_read_features(build):
    net = made(build)
    plan = plan_of(net)
    assert (str(plan.extractor), str(plan.features), plan.head, plan.goes_on) == ("embed", "<score", "score", False)
    assert plan.width == WIDTH
    with pytest.raises(ConfigError, match=f"^{build.__name__} reads its inputs again behind embed, such as a mask"):
        fl.split(net).intermediate(torch.zeros(2, LENGTH, WIDTH))
    Run(quick(get_method("fedproto")), federation(build), RunConfig(rounds=1)).run()


@pytest.mark.parametrize("name", GOING_ON)
@pytest.mark.parametrize("build", [Picks, Masked])
def test_methods_that_go_on_from_features_say_why_they_cannot(name, build):
    with pytest.raises(
        ConfigError, match=r"text: it lets networks go on from features, and \w+ reads its inputs again"
    ):
        Run(quick(get_method(name)), federation(build), RunConfig(rounds=1)).run()


def test_methods_that_train_stages_apart_say_why_they_cannot():
    with pytest.raises(ConfigError, match="trains stages of a network apart, and Picks reads its inputs again behind"):
        Run(quick(get_method("depthfl")), federation(Picks), RunConfig(rounds=1)).run()


@pytest.mark.parametrize("name", ["fedproto", "fedtgp", "felo", "velo"])
def test_features_of_every_token_are_refused_since_whole_texts_would_be_sent(name):
    with pytest.raises(ConfigError, match="text: its head reads every token, so that features would be whole texts"):
        Run(quick(get_method(name)), federation(Averages), RunConfig(rounds=1)).run()


@pytest.mark.parametrize("kind", ["linear", "pool"])
def test_features_of_a_picked_token_are_brought_to_a_width(kind):
    builder = fitted(Picks, FeatureFit(5, kind), 3, (LENGTH,), "models: text")
    net = made(builder)
    parts, ids = fl.split(net), federation(Picks).sites[0].train.inputs
    assert (parts.num_features, parts.head_name) == (5, "score.head")
    assert_close(parts.head(parts.features(ids)), net(ids))
