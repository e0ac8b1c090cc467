"""FedTGP: the loss and the margin of the global prototypes, how they are trained, and what clients make of them."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.needs import Need
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedtgp import FedTGP, MarginLoss, Prototypes, margin_of
from potluck.parts.features import ONE_ROW
from potluck.parts.heads import COMMON_WIDTH
from potluck.parts.prototypes import NearestPrototype

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=64)  # three full steps
ONCE = LocalTraining("sgd", lr=0.1, batch_size=64)
CLASSES = 3


def sent(run, exchange=-1):
    return run.wire.sent["local_update"][exchange]


def replied(run, exchange=-1):
    return run.wire.replied["local_update"][exchange]


def client_net(run, id):
    found = run.model(id)
    return found.net if isinstance(found, NearestPrototype) else found


def features(net, inputs):
    return net.pool(net.stages(inputs))


def gathered(run):
    """All prototypes of the last round and their classes."""
    found = [(p, c) for reply in replied(run).values()
             for p, c in zip(reply["prototypes"], reply["counts"].nonzero().flatten(), strict=True)]  # fmt: skip
    return torch.stack([p for p, _ in found]), torch.stack([c for _, c in found])


class Fixed(torch.nn.Module):
    """Global prototypes that are given."""

    def __init__(self, rows):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.tensor(rows))

    def forward(self):
        return self.rows


# The loss


@pytest.mark.parametrize("margin", [0.0, 2.5])
def test_margin_loss__is_the_contrast_of_distances_with_a_margin_at_the_own_class(margin):
    net = Fixed([[0.0, 0.0], [3.0, 4.0], [0.0, 8.0]])
    found = MarginLoss(margin)(net, Batch(torch.tensor([[0.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1]), {}), {})
    one = [0 + margin, 5.0, 8.0]  # distances of the first, the own class's with the margin
    two = [4.0, 3.0 + margin, 4.0]
    expected = [own + math.log(sum(math.exp(-d) for d in all)) for own, all in ((one[0], one), (two[1], two))]
    assert_close(found.item(), sum(expected) / 2, rtol=1e-6, atol=0)


def test_margin_loss__has_the_gradient_of_its_value():
    torch.manual_seed(0)
    net, loss = Prototypes(CLASSES, 4).double(), MarginLoss(1.5)
    batch = Batch(torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 1, 0]), {})
    for weight in net.parameters():
        (gradient,) = torch.autograd.grad(loss(net, batch, {}), weight)
        place, step, ends = (0,) * weight.dim(), 1e-6, []
        for sign in (1, -1):
            with torch.no_grad():
                weight[place] += sign * step
                ends.append(loss(net, batch, {}))
                weight[place] -= sign * step
        assert_close(gradient[place], (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-8)


def test_margin_loss__is_finite_where_a_prototype_is_met_exactly():
    net = Fixed([[1.0, 2.0], [1.0, 2.0]])
    loss = MarginLoss(0.0)(net, Batch(torch.tensor([[1.0, 2.0]]), torch.tensor([0]), {}), {})
    (gradient,) = torch.autograd.grad(loss, net.rows)
    assert_close(loss.item(), math.log(2), rtol=1e-6, atol=0)
    assert gradient.isfinite().all()


def test_margin_loss__draws_to_the_own_class_and_away_from_others_the_more_so_the_larger_the_margin():
    own, other = [], []
    for margin in (0.0, 3.0):
        net = Fixed([[1.0, 0.0], [-2.0, 0.0]])
        MarginLoss(margin)(net, Batch(torch.zeros(1, 2), torch.tensor([0]), {}), {}).backward()
        own.append(net.rows.grad[0, 0].item())
        other.append(net.rows.grad[1, 0].item())
    assert 0 < own[0] < own[1]  # a step against the gradient is one towards 0
    assert 0 < other[0] < other[1]  # and one away from it


# The margin


ROWS = {
    "values": torch.tensor([[0.0, 0.0], [0.0, 2.0], [4.0, 1.0], [0.0, 13.0]]),
    "labels": torch.tensor([0, 0, 1, 2]),
    "counts": torch.tensor([1, 7, 1, 1]),  # a client's prototype counts once, however many examples are behind it
}  # centres (0, 1), (4, 1), (0, 13); distances 4, 12, sqrt(160)


@pytest.mark.parametrize(("margin", "expected"), [("nearest", 12.0), ("farthest", math.sqrt(160)), ("none", 0.0)])
def test_margin_of__is_the_largest_of_the_distances_between_centres_of_classes(margin, expected):
    assert_close(margin_of(ROWS, 4, margin), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("margin", ["nearest", "farthest"])
def test_margin_of__one_class_asks_for_none(margin):
    rows = {"values": torch.rand(2, 3), "labels": torch.tensor([1, 1]), "counts": torch.tensor([4, 2])}
    assert margin_of(rows, 3, margin) == 0


@pytest.mark.parametrize("margin", ["nearest", "farthest"])
def test_margin_of__two_classes_ask_for_their_distance(margin):
    first = {name: column[:3] for name, column in ROWS.items()}
    assert margin_of(first, 4, margin) == 4.0


def test_the_margin_is_no_larger_than_the_threshold_and_is_noted(play, clouds):
    federation = clouds("mlp2", "mlp3")
    free = play(FedTGP(STILL, STILL, threshold=1e6), federation)
    values, labels = gathered(free)
    expected = margin_of({"values": values, "labels": labels, "counts": labels}, CLASSES, "nearest")
    assert_close(free.reports[0].notes["margin"], expected, rtol=1e-6, atol=0)
    bound = play(FedTGP(STILL, STILL, threshold=expected / 3), federation)
    assert_close(bound.reports[0].notes["margin"], expected / 3, rtol=1e-6, atol=0)


# The server


def test_prototypes_are_two_layers_with_a_relu_of_a_vector_a_class():
    net = Prototypes(2, 2)
    net.load_state_dict(
        {
            "vectors.weight": torch.tensor([[1.0, 2.0], [-3.0, 1.0]]),
            "layers.0.weight": torch.tensor([[1.0, 0.0], [1.0, -1.0]]),
            "layers.0.bias": torch.tensor([0.5, 0.0]),
            "layers.2.weight": torch.tensor([[2.0, 1.0], [0.0, 1.0]]),
            "layers.2.bias": torch.tensor([0.0, -1.0]),
        }
    )
    # between the layers: 1 + 0.5 and 1 - 2; -3 + 0.5 and -3 - 1; of these all but the first are cut off
    assert_close(net(), torch.tensor([[3.0, -1.0], [0.0, -1.0]]))


def test_the_server_steps_against_the_loss_of_all_prototypes_of_the_round(play, clouds):
    run = play(FedTGP(STILL, ONCE), clouds("mlp2", "norm3", labels=((0, 1), (0, 1, 2))), rounds=2)
    net = Prototypes(CLASSES, 8)
    net.load_state_dict(run.states[1].network)
    values, labels = gathered(run)
    assert labels.tolist() == [0, 1, 0, 1, 2]
    loss = MarginLoss(margin_of({"values": values, "labels": labels, "counts": labels}, CLASSES, "nearest"))
    gradients = torch.autograd.grad(loss(net, Batch(values, labels, {}), {}), list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient
    assert_close(dict(net.state_dict()), run.state.network)
    assert_close(net().detach(), run.state.prototypes["means"])


def test_global_prototypes_come_to_be_nearest_to_those_of_their_class(play, clouds):
    strong = LocalTraining("adam", lr=0.02, epochs=100, batch_size=64)
    run = play(FedTGP(LocalTraining("sgd", lr=0.1, epochs=20), strong), clouds("mlp2"))
    values, labels = gathered(run)
    nearest = torch.cdist(values, run.state.prototypes["means"]).argmin(1)
    assert nearest.tolist() == labels.tolist() == [0, 1, 2]


def test_clients_are_sent_what_the_server_has_trained_and_classes_that_nobody_has_are_masked(play, clouds):
    run = play(FedTGP(FULL, FULL), clouds("mlp2", "mlp3", labels=((0, 1), (1, 0))), rounds=2)
    assert run.reports[0].traffic.down == {}
    for message in sent(run).values():
        assert_close(message["prototypes"], run.states[1].prototypes, **EXACTLY)
        assert message["prototypes"]["known"].tolist() == [True, True, False]
        assert not message["prototypes"]["means"][2].any()
    outputs = run.model(0)(torch.randn(50, 6))
    assert not (outputs.argmax(1) == 2).any()


def test_a_class_stays_known_and_its_prototype_trained_when_its_clients_are_away(play, clouds):
    run = play(FedTGP(FULL, FULL), clouds("mlp2", "mlp2", labels=((0, 1), (1, 2))), rounds=0)
    run.round(0)
    run.round(1)
    assert run.state.prototypes["known"].all()
    first, second = (state.prototypes["means"][0] for state in run.states[1:])
    assert not torch.equal(first, second)  # the other client's prototypes have pushed it


# Clients


def test_local_training_descends_the_tasks_loss_and_the_distance_to_the_global_prototypes(play, clouds):
    federation = clouds("mlp2", "mlp3")
    run = play(FedTGP(FULL, FULL, strength=2.0), federation)
    nets = [client_net(run, id) for id in (0, 1)]
    run.round()
    for id, net in enumerate(nets):
        table, examples = sent(run)[id]["prototypes"]["means"], federation.sites[id].train
        for _ in range(3):
            h = features(net, examples.inputs)
            loss = F.cross_entropy(net.head(h), examples.labels)
            loss = loss + 2.0 * ((h - table[examples.labels]) ** 2).sum() / h.numel()
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
        assert_close(parameters_of(client_net(run, id)), parameters_of(net))


def test_clients_report_the_means_of_their_trained_networks(play, clouds):
    federation = clouds("norm2", "mlp3", labels=((0, 2), (0, 1, 2)))
    run = play(FedTGP(FULL, FULL), federation)
    for id, site in federation.sites.items():
        h, labels = features(client_net(run, id).eval(), site.train.inputs).detach(), site.train.labels
        expected = torch.stack([h[labels == label].mean(0) for label in labels.unique()])
        assert_close(replied(run)[id]["prototypes"], expected)


def test_a_newcomer_with_an_architecture_nobody_had_is_sent_the_prototypes_and_changes_them(play, clouds):
    run = play(FedTGP(FULL, FULL), clouds("mlp2", "mlp2", "norm3"), rounds=0)
    run.round(0, 1)
    assert isinstance(run.model(2), NearestPrototype)  # though it has never taken part
    run.round(2)
    assert_close(sent(run)[2]["prototypes"], run.states[1].prototypes, **EXACTLY)
    assert not torch.equal(run.state.prototypes["means"], run.states[1].prototypes["means"])


def test_needs_and_ranges():
    assert FedTGP().needs() == {Need.SPLIT_MODEL, Need.CLASSES, ONE_ROW, COMMON_WIDTH}
    for options, expected in (
        ({"strength": -1.0}, "strength: expected at least 0"),
        ({"threshold": 0.0}, "threshold: expected above 0"),
        ({"margin": "mean"}, "margin: expected"),
    ):
        with pytest.raises(ValueError, match=expected):
            replace(FedTGP(), **options)
