import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.inputs import Form
from potluck.core.nets.entrance import with_entrance
from potluck.core.nets.splitting import CannotSplit, Splits, plan_of, split_problem


class Counted(nn.Sequential):
    """Counts how often it has been looked at, however many nets there are."""

    looks = 0

    def forward(self, x):
        type(self).looks += 1
        return super().forward(x)


def counted():
    return Counted(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def test_splits__looks_at_an_architecture_once_when_a_plan_is_first_asked_for():
    splits = Splits((6,), real_inputs=True)
    nets = [splits.remember(counted(), ("one",)) for _ in range(3)]
    assert Counted.looks == 0, "nobody has asked"
    plans = {id(plan_of(net)) for net in (*nets, copy.deepcopy(nets[0]))}
    looks = Counted.looks
    assert looks > 0
    assert len(plans) == 1
    plan_of(splits.remember(counted(), ("one",)))
    assert Counted.looks == looks
    plan_of(splits.remember(counted(), ("another",)))
    assert Counted.looks == 2 * looks


def test_splits__federations_of_one_builder_and_the_same_inputs_look_once():
    first, second = (Splits((6,), real_inputs=True).remember(counted(), ("one",), builder=counted) for _ in range(2))
    assert plan_of(first) is plan_of(second)
    other = Splits((6,), real_inputs=True).remember(counted(), ("one",), ["0", "4"], builder=counted)
    assert plan_of(other) is not plan_of(first)


def test_splits__an_architecture_of_named_inputs_is_looked_at_with_numbers_that_suit_tokens_and_masks():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.mix, self.out = nn.Embedding(2, 4), nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, ids, mask, age):
            mask = mask.unsqueeze(-1)
            mean = (self.tokens(ids) * mask).sum(1) / mask.sum(1)
            return self.out(self.mix(torch.cat([mean, age], 1)).relu())

    ids, mask = Form((7,), torch.int64), Form((7,), torch.int64)
    shape = {"ids": ids, "mask": mask, "age": Form((1,), torch.float32)}
    net = Splits(shape, real_inputs=False).remember(with_entrance(Masked(), shape), ("masked",))
    plan = plan_of(net)
    assert [str(place) for place in plan.places] == ["<mix", "mix", "<out"], "before that the mask goes beside"
    assert (str(plan.extractor), str(plan.features)) == ("<mix", "<out")
    inputs = {"ids": torch.randint(2, (3, 7)), "mask": torch.ones(3, 7, dtype=torch.int64), "age": torch.randn(3, 1)}
    s_in, s_out, outputs = plan.passed(net, inputs)
    assert_close(plan.course.run(net, s_in, plan.extractor), outputs)
    assert_close(net.out(s_out), outputs)
    assert_close(plan.course.run(net, inputs, stop=plan.extractor), s_in)


def test_splits__a_net_keeps_its_names_its_state_and_its_copies():
    net, plain = Splits((6,), real_inputs=True).remember(counted(), ("one",)), counted()
    plan_of(net)
    assert net.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]
    assert repr(net) == repr(plain)
    assert str(plan_of(pickle.loads(pickle.dumps(net))).extractor) == str(plan_of(net).extractor)


@pytest.mark.parametrize("known", [False, None])
def test_splits__nets_that_embed_are_looked_at_with_tokens_that_every_embedding_has(known):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(50, 4), nn.Embedding(7, 4)
            self.mix, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
            return self.out(self.mix(x).relu().mean(1))

    net = Splits((7,), real_inputs=known).remember(Reads(), ("reads",))
    plan = plan_of(net)
    assert (str(plan.extractor), plan.extractor.shape, plan.channels[plan.extractor]) == ("tokens", (7, 4), 1)
    tokens = torch.randint(50, (2, 7))
    h = plan.course.run(net, tokens, stop=plan.extractor)
    assert_close(plan.course.run(net, h, plan.extractor), net(tokens))


def test_split_problem__is_said_the_same_each_time_it_is_asked():
    net = Splits((6,), real_inputs=True).remember(nn.Linear(6, 3), ("line",))
    first, second = split_problem(net), split_problem(net)
    assert first == second
    assert first is not None
    assert first.startswith("Linear cannot be split into extractor, intermediate layers and classifier: no layer with")


def test_plan_of__asks_for_a_net_that_a_federation_has_built():
    with pytest.raises(CannotSplit, match="not a network that a federation has built"):
        plan_of(counted())
