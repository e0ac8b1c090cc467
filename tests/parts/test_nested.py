"""Networks inside one another: the names of their statistics, and replies of which only a part counts."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.testing import assert_close

from potluck.core.message import Message
from potluck.core.nets.scale import Scale
from potluck.core.nets.slicing import cut_of, inside, lies_in, part
from potluck.core.requests.fit import LocalTraining
from potluck.core.roles import Arriving
from potluck.parts.means import Aggregate
from potluck.parts.nested import Nested, NestedWidths, by_width, of_width, of_widths
from potluck.testing.worlds import toy_net


@dataclass(frozen=True)
class Halves(NestedWidths):
    training: LocalTraining = LocalTraining()
    levels: tuple[float, ...] = (1.0, 0.5)
    combine: Aggregate = Aggregate()


ROSTER = dict.fromkeys(range(5), SimpleNamespace(head=None))
SERVER = SimpleNamespace(build=lambda width=1.0: toy_net(1, batchnorm=True, scale=Scale(width)), roster=ROSTER)


def test_by_width__names_tell_widths_apart_that_begin_alike():
    found = by_width([(0.5, {"a": torch.tensor(1.0)}), (0.55, {"a": torch.tensor(2.0)})])
    assert of_width(found, 0.5) == {"a": torch.tensor(1.0)}
    assert of_widths(found, [0.5]) == {"0.5/a": torch.tensor(1.0)}
    assert of_widths(found, []) == {}


def merged(heard, rule="mean"):
    """The state before, and after three clients have replied their number in all places."""
    weights, statistics = Halves().initial(SERVER)
    state = SimpleNamespace(weights=weights, statistics=statistics)
    replies = {
        id: Message(
            weights={name: torch.full_like(tensor, id) for name, tensor in weights.items()},
            tracked={name: torch.full_like(tensor, id) for name, tensor in statistics.items()},
        )
        for id in (1, 2, 4)
    }
    arriving = Arriving(iter(replies.items()), {})
    return state, Halves(combine=Aggregate(rule)).merge(state, arriving, dict.fromkeys(heard, 1.0), SERVER, heard=heard)


def test_merge__what_is_not_heard_of_a_reply_does_not_count():
    _, (weights, statistics) = merged({1: [1.0, 0.5], 2: [0.5], 4: []})
    inside = weights["head.weight"][:, :8]
    assert_close(inside, torch.full_like(inside, 1.5))
    assert_close(weights["head.weight"][:, 8:], torch.ones(4, 8))
    assert_close(statistics["0.5/stages.stem.1.running_mean"], torch.full((8,), 1.5))
    assert_close(statistics["1.0/stages.stem.1.running_mean"], torch.ones(16))


def test_merge__with_a_rule_that_needs_all_replies_together():
    _, (weights, _) = merged({1: [1.0, 0.5], 2: [1.0, 0.5], 4: [1.0, 0.5]}, "median")
    assert_close(weights["head.weight"], torch.full((4, 16), 2.0))


def test_merge__if_nobody_is_heard_nothing_changes():
    before, (weights, statistics) = merged({1: [], 2: [], 4: []})
    assert all(torch.equal(weights[name], old) for name, old in before.weights.items())
    assert all(torch.equal(statistics[name], old) for name, old in before.statistics.items())


def split(num_classes=4, input_shape=(6,)):
    """Two layers side by side, whose narrower nets do not have leading channels."""

    class Split(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = torch.nn.Linear(6, 8), torch.nn.Linear(6, 4)
            self.last = torch.nn.Linear(12, 4)

        def forward(self, x):
            return self.last(torch.cat([self.left(x), self.right(x)], 1).relu())

    return Split()


def cut(width):
    full = split()
    return full if width == 1 else cut_of(split(), Scale(width).of, (6,)).of(full)


def test_nested__a_narrow_net_inside_one_that_is_not_a_leading_slice():
    """Channels keep their places in the full net, whichever net of those that a client has is the widest."""
    torch.manual_seed(0)
    half, quarter = cut(0.5), cut(0.25)
    net = Nested([half, quarter])
    x = torch.randn(3, 6)
    places = {name: inside(lies_in(quarter)[name], lies_in(half)[name]) for name in quarter.state_dict()}
    assert places["last.weight"][1].tolist() == [0, 1, 4]  # two of the left layer's, and one of the right one's
    quarter.load_state_dict({name: part(tensor, places[name]) for name, tensor in half.state_dict().items()})
    assert_close(net.at(1, x), quarter(x))


def test_merge__what_counts_of_a_narrow_reply_lies_where_it_lies_in_the_full_net():
    server = SimpleNamespace(build=lambda width=1.0: cut(width), roster=ROSTER)
    weights = {name: torch.zeros_like(tensor) for name, tensor in cut(1.0).state_dict().items()}
    reply = Message(weights={"last.weight": torch.arange(1.0, 7.0).repeat(4, 1)})
    state, method = SimpleNamespace(weights=weights, statistics={}), Halves(levels=(1.0, 0.5, 0.25))
    found, _ = method.merge(state, Arriving(iter([(1, reply)]), {}), {1: 0.5}, server, heard={1: [0.25]})
    assert found["last.weight"][0].tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0]
