"""SlimFL: the loss of all widths at once, what is decoded of a reply, and what becomes of the rest."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.core.ground.rng import Key, isolated
from potluck.core.needs import Need
from potluck.core.nets.scale import Scale
from potluck.core.nets.weights import load, parameters_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.slimfl import SlimFL, SuperpositionLoss
from potluck.parts.nested import Nested
from potluck.parts.submodels import leading, select

EXACTLY = {"rtol": 0, "atol": 0}
CERTAIN = partial(SlimFL, decoded=(1.0, 1.0))
THIRDS = {"levels": (1.0, 0.5, 0.25), "weights": (0.5, 0.3, 0.2)}
BATCH = Batch(torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3, {})


class Listening(SlimFL):
    """Writes down, in order of the cohort, the rates and the channels."""

    drawn = []

    def heard(self, rate, channel):
        self.drawn.append((rate, channel))
        return super().heard(rate, channel)


@pytest.fixture
def listening():
    Listening.drawn = []
    return Listening


def nested(clouds, *widths):
    with isolated(Key(("nested",))):
        return Nested(clouds("norm2").architectures["norm2"](scale=Scale(width)) for width in widths)


def gathered(net, narrow):
    """The narrow net with the leading slices of the wide one's weights."""
    shapes = {name: tensor.shape for name, tensor in narrow.named_parameters()}
    return load(narrow, select(parameters_of(net), leading(shapes)), partial=True)


def place_of(tensor):
    return tuple(map(slice, tensor.shape))


# Superposition training


@pytest.mark.parametrize("widths", [(1.0, 0.5, 0.25), (0.5, 0.25), (0.25,)])
@pytest.mark.parametrize("distil", [True, False])
def test_a_step_is_the_weighted_sum_of_all_widths_gradients_in_which_the_teacher_is_fixed(clouds, widths, distil):
    weights = (0.5, 0.3, 0.2)
    nets = nested(clouds, *widths)
    loss = SuperpositionLoss(F.cross_entropy, weights, distil)(nets, BATCH, {})
    loss.backward()
    expected = {name: torch.zeros_like(p) for name, p in nets[0].named_parameters()}
    value, total = torch.zeros(()), sum(weights[: len(widths)])
    q = gathered(nets[0], nested(clouds, widths[0])[0])(BATCH.inputs).detach().softmax(1)
    for place, width in enumerate(widths):
        alone = gathered(nets[0], nested(clouds, width)[0])
        logits = alone(BATCH.inputs)
        taught = distil and place > 0
        own = (
            (q * (q.log() - logits.log_softmax(1))).sum(1).mean() if taught else F.cross_entropy(logits, BATCH.targets)
        )
        own = own * weights[place] / total
        value = value + own
        for (name, p), g in zip(
            alone.named_parameters(), torch.autograd.grad(own, list(alone.parameters())), strict=True
        ):
            expected[name][place_of(p)] += g
    assert_close(loss, value)
    assert_close({name: p.grad for name, p in nets[0].named_parameters()}, expected, rtol=1e-4, atol=1e-6)
    assert not any(p.grad is not None for net in nets[1:] for p in net.parameters())


def test_outside_the_narrow_nets_the_widest_one_learns_from_labels_alone(clouds):
    nets = nested(clouds, 1.0, 0.5)
    SuperpositionLoss(F.cross_entropy, (0.25, 0.75), distil=True)(nets, BATCH, {}).backward()
    wide = nested(clouds, 1.0)[0]
    F.cross_entropy(wide(BATCH.inputs), BATCH.targets).backward()
    outside = nets[0].get_parameter("head.weight").grad[:, 4:]
    assert_close(outside, 0.25 * wide.head.weight.grad[:, 4:])
    assert outside.any()


def test_a_width_of_weight_0_is_left_out(clouds):
    nets = nested(clouds, 1.0, 0.5, 0.25)
    SuperpositionLoss(F.cross_entropy, (0.5, 0.0, 0.5), distil=True)(nets, BATCH, {}).backward()
    assert [int(net.stages.stage0[1].num_batches_tracked) for net in nets] == [1, 0, 1]


def test_one_local_step_of_sgd_is_the_papers(play, clouds):
    federation = clouds("norm2")
    run = play(CERTAIN(LocalTraining("sgd", lr=0.5, batch_size=100), weights=(0.7, 0.3)), federation)
    data = federation.sites[0].train
    nets = Nested(run.engine.server(0).build(width=width) for width in (1.0, 0.5))
    loss = SuperpositionLoss(F.cross_entropy, (0.7, 0.3), distil=True)
    loss(nets, data.batch(torch.arange(len(data))), {}).backward()
    stepped = {name: (p - 0.5 * p.grad).detach() for name, p in nets[0].named_parameters()}
    assert_close(run.state.weights, stepped)


# What is decoded


def test_heard_is_all_widths_from_the_widest_that_the_channel_allows():
    method = SlimFL(**THIRDS, decoded=(0.25, 0.5, 0.75))
    assert [method.heard(1.0, channel) for channel in (0.0, 0.25, 0.5, 0.75)] == [
        [1.0, 0.5, 0.25],
        [0.5, 0.25],
        [0.25],
        [],
    ]
    assert method.heard(0.5, 0.0) == [0.5, 0.25]  # of a client that trains no more


@pytest.mark.slow
def test_parts_are_decoded_as_often_as_stated_for_each_client_and_round_anew(play, clouds, listening):
    run = play(listening(LocalTraining(steps=1), decoded=(0.3, 0.8)), clouds(*["mlp2"] * 4), rounds=25)
    channels = torch.tensor([channel for _, channel in listening.drawn]).view(25, 4)
    assert len(channels.unique()) == 100
    notes = [report.notes for report in run.reports]
    right, left = (sum(note[name] for note in notes) for name in ("decoded-1", "decoded-0.5"))
    assert abs(left - 80) < 4 * 4  # binomial, of 100 draws
    assert abs(right - 30) < 4 * 4.6
    assert all(note["decoded-1"] <= note["decoded-0.5"] for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("distil", [True, False])
def test_every_number_is_the_plain_mean_over_the_replies_of_which_it_was_decoded(play, clouds, listening, distil):
    decoded = (0.3, 0.6, 0.8)
    capacities = (1.0, 1.0, 1.0, 0.5)
    method = listening(LocalTraining(epochs=2, batch_size=4), **THIRDS, decoded=decoded, distil=distil)
    run = play(method, clouds(*["norm3"] * 4, capacities=capacities), rounds=6)
    covered_by = set()
    for number, (before, after) in enumerate(zip(run.states, run.states[1:], strict=False)):
        replies, drawn = run.wire.replied["local_update"][number], listening.drawn[4 * number : 4 * number + 4]
        assert [rate for rate, _ in drawn] == list(capacities)
        widest = {
            id: max((w for w, q in zip(method.levels, decoded, strict=True) if channel < q and w <= rate), default=0.0)
            for id, (rate, channel) in enumerate(drawn)
        }
        narrow = {w: dict(run.engine.server(0).build(width=w).named_parameters()) for w in set(widest.values()) - {0.0}}
        for name, old in before.weights.items():
            total, count = torch.zeros_like(old), torch.zeros_like(old)
            for id, width in widest.items():
                if width:
                    place = place_of(narrow[width][name])
                    total[place] += replies[id]["weights"][name][place]
                    count[place] += 1
            assert_close(after.weights[name][count > 0], (total / count)[count > 0])
            assert torch.equal(after.weights[name][count == 0], old[count == 0])
            covered_by |= set(count.unique().tolist())
        for name, old in before.statistics.items():
            found = [replies[id]["tracked"][name] for id, w in widest.items() if float(name.partition("/")[0]) <= w]
            if not found:
                assert torch.equal(after.statistics[name], old)
            elif old.is_floating_point():
                assert_close(after.statistics[name], torch.stack(found).mean(0))
    assert covered_by == {0.0, 1.0, 2.0, 3.0, 4.0}  # else the test has not seen all cases


def test_a_rest_that_is_never_decoded_stays_as_it_began(play, clouds):
    run = play(SlimFL(decoded=(0.0, 1.0)), clouds(*["norm2"] * 3), rounds=3)
    first, last = run.states[0], run.states[-1]
    for name, tensor in run.engine.server(0).build(width=0.5).named_parameters():
        inside = torch.zeros_like(first.weights[name], dtype=torch.bool)
        inside[place_of(tensor)] = True
        assert torch.equal(last.weights[name][~inside], first.weights[name][~inside])
        assert not torch.equal(last.weights[name][inside], first.weights[name][inside])
    for name, old in first.statistics.items():
        assert torch.equal(last.statistics[name], old) == name.startswith("1.0/")


def test_everyone_sends_all_whatever_is_decoded(play, clouds):
    runs = [play(SlimFL(decoded=decoded), clouds("norm2", "norm2")) for decoded in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))]
    assert len({run.reports[0].traffic.up["weights"] for run in runs}) == 1
    for run in runs:
        for reply in run.wire.replied["local_update"][0].values():
            assert {name: t.shape for name, t in reply["weights"].items()} == {
                name: t.shape for name, t in run.state.weights.items()
            }
            assert reply.keys() == {"weights", "tracked"}
    assert_close(runs[0].state.weights, runs[0].states[0].weights, **EXACTLY)


def test_who_fails_is_not_noted_as_decoded(play, clouds):
    class Failing(CERTAIN.func):
        def receive(self, client, message):
            if client.id == 1:
                raise RuntimeError("lost")
            return super().receive(client, message)

    run = play(Failing(decoded=(1.0, 1.0)), clouds(*["norm2"] * 3), tolerate_failures=True)
    assert run.reports[0].notes["decoded-1"] == run.reports[0].notes["decoded-0.5"] == 2


# Predicting, and what it asks for


def test_a_client_predicts_at_its_width_with_that_widths_statistics_and_the_server_at_the_largest(play, clouds):
    run = play(CERTAIN(), clouds("norm2", "norm2", capacities=(1.0, 0.5)), rounds=2)
    for rate, model in ((1.0, run.model(0)), (0.5, run.model(1)), (1.0, run.engine.global_model(run.state))):
        for name, tensor in model.state_dict().items():
            expected = run.state.weights.get(name, run.state.statistics.get(f"{rate}/{name}"))
            assert torch.equal(tensor, expected[place_of(tensor)])


def test_it_warns_of_clients_below_the_smallest_width(play, clouds):
    with pytest.warns(PotluckWarning, match=r"slimfl: client 0: capacity 0\.3 lies below the smallest level, 0\.5"):
        play(SlimFL(), clouds("norm2", capacities=(0.3,)), rounds=0)


def test_only_distillation_needs_classes():
    assert Need.CLASSES in SlimFL().needs()
    assert Need.CLASSES not in SlimFL(distil=False).needs()
    assert Need.CLASSES not in SlimFL(levels=(1.0,), weights=(1.0,), decoded=(1.0,)).needs()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"levels": (1.0, 0.5, 0.25)}, "weights: expected one number for each of 3 levels"),
        ({"decoded": (1.0,)}, "decoded: expected one number for each of 2 levels"),
        ({"levels": (0.5, 1.0)}, "levels: expected each smaller than the one before"),
        ({"levels": (0.5, 0.5)}, "levels: expected each smaller than the one before"),
        ({"levels": (), "weights": (), "decoded": ()}, "levels: expected at least one"),
        ({"weights": (0.0, 1.0)}, "weights: expected a first one above 0"),
        ({"weights": (1.0, -1.0)}, "weights"),
        ({"decoded": (0.9, 0.8)}, "decoded: expected none smaller than the one before"),
        ({"decoded": (0.5, 1.5)}, "decoded"),
    ],
)
def test_numbers_that_belong_to_no_widths_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        SlimFL(**options)
