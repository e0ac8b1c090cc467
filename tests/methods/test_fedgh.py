"""FedGH: on what the header is trained, and who uses it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need, Offer
from potluck.core.requests.fit import LocalTraining
from potluck.experiment.federation.needs import check_needs
from potluck.methods.fedgh import FedGH
from potluck.models.contract import StagedNet
from potluck.parts.heads import COMMON_HEAD, PLAIN_HEAD, TRAINED_HEAD, WHOLE_HEAD

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
CLASSES = 3


def sent(run, exchange=-1):
    return run.wire.sent["local_update"][exchange]


def replied(run, exchange=-1):
    return run.wire.replied["local_update"][exchange]


def header(weights):
    head = nn.Linear(8, CLASSES)
    head.load_state_dict(weights)
    return head


def gathered(run):
    """All means of the last round and their classes, by client and class."""
    found = [(p, c) for reply in replied(run).values()
             for p, c in zip(reply["prototypes"], reply["counts"].nonzero().flatten(), strict=True)]  # fmt: skip
    return torch.stack([p for p, _ in found]), torch.stack([c for _, c in found])


def test_the_header_steps_against_the_cross_entropy_of_all_means(play, clouds):
    run = play(FedGH(FULL, FULL), clouds("mlp2", "norm3", labels=((0, 1), (0, 1, 2))), rounds=2)
    values, labels = gathered(run)
    assert labels.tolist() == [0, 1, 0, 1, 2]
    head = header(run.states[1].head)  # it goes on from where it was
    gradients = torch.autograd.grad(F.cross_entropy(head(values), labels), list(head.parameters()))
    for (name, before), gradient in zip(head.named_parameters(), gradients, strict=True):
        assert_close(run.state.head[name], before.detach() - 0.1 * gradient)


def test_by_default_it_takes_one_step_for_each_mean(play, clouds):
    run = play(FedGH(FULL), clouds("mlp2", labels=((2,),)))
    (values, labels), head = gathered(run), header(run.states[0].head)
    gradients = torch.autograd.grad(F.cross_entropy(head(values), labels), list(head.parameters()))
    for (name, before), gradient in zip(head.named_parameters(), gradients, strict=True):
        assert_close(run.state.head[name], before.detach() - 0.01 * gradient)
    assert FedGH().server_training.batch_size == 1


def test_the_header_learns_to_recognise_the_means_of_all_clients(play, clouds):
    strong = LocalTraining("adam", lr=0.1, epochs=200, batch_size=64)
    run = play(FedGH(LocalTraining("sgd", lr=0.1, epochs=20), strong), clouds("mlp2", "mlp3"))
    values, labels = gathered(run)
    assert header(run.state.head)(values).argmax(1).tolist() == labels.tolist()
    assert header(run.states[0].head)(values).argmax(1).tolist() != labels.tolist()


def test_means_are_those_of_the_trained_network_by_class_that_the_client_has(play, clouds):
    federation = clouds("norm2", "mlp3", labels=((0, 2), (0, 1, 2)))
    run = play(FedGH(FULL), federation)
    for id, site in federation.sites.items():
        net = run.model(id).eval()
        h, labels = net.pool(net.stages(site.train.inputs)).detach(), site.train.labels
        expected = torch.stack([h[labels == label].mean(0) for label in labels.unique()])
        assert_close(replied(run)[id]["prototypes"], expected)
    assert replied(run)[0]["counts"].tolist() == [6, 0, 6]


def test_clients_train_from_the_header_and_their_own_other_layers(play, clouds):
    federation = clouds("mlp2", "mlp3")
    run = play(FedGH(FULL, FULL), federation)
    net, train = run.model(0), federation.sites[0].train
    assert_close(dict(net.head.state_dict()), run.state.head, **EXACTLY)
    assert not torch.equal(net.head.weight, run.kept(0)["model"]["head.weight"])  # which its training had changed
    loss = F.cross_entropy(net(train.inputs), train.labels)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    run.round()
    for (name, before), gradient in zip(net.named_parameters(), gradients, strict=True):
        assert_close(run.kept(0)["model"][name], before.detach() - 0.1 * gradient)


def test_a_class_that_a_client_lacks_is_taught_by_the_others(play, clouds):
    strong = LocalTraining("sgd", lr=0.5, epochs=30, batch_size=64)
    run = play(FedGH(FULL, strong), clouds("mlp2", "mlp3", labels=((0, 1), (2,))))
    values, labels = gathered(run)
    assert labels.tolist() == [0, 1, 2]
    kept = run.kept(0)["model"]
    own = header({"weight": kept["head.weight"], "bias": kept["head.bias"]})
    taught, untaught = (head(values[2]).softmax(0)[2] for head in (run.model(0).head, own))
    assert taught > 0.5 > untaught


def test_a_class_that_nobody_has_is_never_the_target(play, clouds):
    strong = LocalTraining("sgd", lr=0.5, epochs=30, batch_size=64)
    run = play(FedGH(FULL, strong), clouds("mlp2", "mlp3", labels=((0, 1), (1, 0))))
    assert run.state.head["bias"][2] < run.states[0].head["bias"][2]


def test_a_newcomer_with_an_architecture_nobody_had_predicts_with_the_header_and_is_sent_it(play, clouds):
    run = play(FedGH(FULL, FULL), clouds("mlp2", "mlp2", "norm3"), rounds=0)
    run.round(0, 1)
    assert_close(dict(run.model(2).head.state_dict()), run.state.head, **EXACTLY)
    run.round(2)
    assert_close(sent(run)[2]["head"], run.states[1].head, **EXACTLY)


def test_clients_adopt__else_nothing_is_sent_back(play, clouds):
    run = play(FedGH(FULL, FULL, clients_adopt=False), clouds("mlp2", "mlp3"), rounds=2)
    assert run.reports[1].traffic.down == {}
    assert_close(dict(run.model(0).state_dict()), run.kept(0)["model"], **EXACTLY)


def test_messages_hold_the_header_means_and_counts_alone(play, clouds):
    run = play(FedGH(FULL), clouds("mlp2", "mlp3", labels=((0, 1), (0, 1, 2))), rounds=2)
    head, width, floats, integers = 3 * (8 + 1), 8, 4, 8
    assert run.reports[1].traffic.down == {"head": 2 * head * floats}
    assert run.reports[1].traffic.up == {"counts": 2 * CLASSES * integers, "prototypes": (2 + 3) * width * floats}


def normed_head():
    stages = {"stem": nn.Linear(6, 8), "deep": nn.ReLU()}
    return StagedNet(stages, nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, CLASSES)), num_features=8)


def test_needs_a_common_head_without_batchnorm(clouds):
    heads = {WHOLE_HEAD, COMMON_HEAD, PLAIN_HEAD, TRAINED_HEAD}
    assert FedGH().needs() == {Need.SPLIT_MODEL, Need.CLASSES} | heads
    check_needs(FedGH().needs(), "fedgh", Offer.of(clouds("mlp2", "norm3")))
    with pytest.raises(ConfigError, match="all clients get one head"):
        check_needs(FedGH().needs(), "fedgh", Offer.of(clouds("mlp2", "wide2")))
    federation = replace(clouds("mlp2"), architectures={"mlp2": partial(normed_head)})
    with pytest.raises(ConfigError, match="that of mlp2 has BatchNorm"):
        check_needs(FedGH().needs(), "fedgh", Offer.of(federation))
