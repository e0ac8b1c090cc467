import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in, isolated
from potluck.core.nets.weights import load, parameters_of, weights_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedgen import FedGen, GuidedLoss
from potluck.parts.generator import Generator, GeneratorLoss
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
QUICK = LocalTraining("sgd", lr=0.1, batch_size=8)
SMALL = {"samples": 64, "hidden": 16, "noise": 4}
BOTH = ["norm2", "norm3"]


@pytest.fixture
def isolated_draws():
    with isolated(fold_in(0, "test of fedgen")):
        yield


def sent(run, exchange=-1):
    return run.wire.sent["local_update"][exchange]


# The generator (eq. 4)


def test_the_shares_of_the_clients_sum_to_one_for_each_class_that_any_has(play, clouds, monkeypatch):
    seen = []
    plain = GeneratorLoss.__call__
    monkeypatch.setattr(
        GeneratorLoss,
        "__call__",
        lambda self, net, batch, extras: seen.append((batch, extras)) or plain(self, net, batch, extras),
    )
    play(FedGen(QUICK, ensemble="share", **SMALL), clouds(*BOTH, labels=((0,), (0, 1))))
    assert all(torch.equal(extras["shares"].sum(0), torch.tensor([1.0, 1.0, 0.0])) for _, extras in seen)
    assert {label for batch, _ in seen for label in batch.targets.tolist()} == {0, 1}  # nobody has class 2


def test_the_generator_learns_to_be_recognised_by_the_layers_that_were_sent_and_leaves_them_alone(play, clouds):
    strong = LocalTraining(lr=0.02, batch_size=32, epochs=20)
    run = play(FedGen(QUICK, strong, **SMALL), clouds(*BOTH))
    server, labels = run.engine.server(1), torch.arange(60) % 3
    heads = [load(nn.Linear(8, 3), {n.removeprefix("head."): w for n, w in reply["weights"].items() if "head" in n})
             for reply in run.wire.replied["local_update"][0].values()]  # fmt: skip
    losses = []
    for weights in (run.states[0].generator, run.state.generator):
        net = load(server.module("generator", lambda: Generator(3, 4, 16, 8)), weights).eval()
        z = net(labels, torch.randn(60, 4, generator=torch.Generator().manual_seed(0)))
        losses.append(F.cross_entropy((heads[0](z) + heads[1](z)) / 2, labels).item())
    assert losses[1] < 0.5 * losses[0]
    plain = play(FedGen(QUICK, STILL, **SMALL), clouds(*BOTH))
    assert_close(run.state.weights, plain.state.weights, **EXACTLY)


# Clients


def test_the_first_round_has_no_generator_and_later_ones_the_servers(play, clouds):
    run = play(FedGen(QUICK, QUICK, **SMALL), clouds(*BOTH, labels=((0,), (0, 1))), rounds=1)
    assert all("generator" not in message for message in sent(run).values())
    first = run.state.generator
    run.round()
    for message in sent(run).values():
        assert_close(message["generator"], first, **EXACTLY)
        counted = sum(torch.bincount(site.train.labels, minlength=3) for site in run.engine.federation.sites.values())
        assert torch.equal(message["labels"], counted)
    assert run.kept(0) == {"state": {}}  # the generator is the server's


@pytest.mark.usefixtures("isolated_draws")
def test_guided_loss__adds_the_last_layers_loss_on_generated_features_of_the_classes_there_are(play, clouds):
    net, generator = play(FedGen(), clouds("mlp2"), rounds=0).model(0), Generator(3, 4, 16, 8).eval()
    data = Batch(torch.randn(6, 6), torch.tensor([0, 0, 0, 1, 1, 1]), {})
    extras = {"generator": generator, "labels": torch.tensor([0.0, 5.0, 0.0])}
    with isolated(fold_in(1)):
        found = GuidedLoss(F.cross_entropy, 2.0, 3.0)(net, data, extras)
    with isolated(fold_in(1)):
        labels = torch.multinomial(extras["labels"], 6, replacement=True)
        fake, _ = generator.drawn(labels)
        alike, _ = generator.drawn(data.targets)
    assert labels.tolist() == [1] * 6
    outputs, probs = net(data.inputs), net.head(alike).softmax(1).detach()
    expected = F.cross_entropy(outputs, data.targets) + 2 * F.cross_entropy(net.head(fake), labels)
    assert_close(found, expected - 3 * (probs * outputs.log_softmax(1)).sum(1).mean())


@pytest.mark.usefixtures("isolated_draws")
def test_guided_loss__by_generated_features_reaches_the_last_layer_only(play, clouds):
    net, generator = play(FedGen(), clouds("mlp2"), rounds=0).model(0), Generator(3, 4, 16, 8).eval()
    data = Batch(torch.randn(6, 6), torch.tensor([0, 0, 0, 1, 1, 1]), {})
    extras, names = {"generator": generator, "labels": torch.ones(3)}, [name for name, _ in net.named_parameters()]

    def gradients(alpha):
        with isolated(fold_in(1)):
            loss = GuidedLoss(F.cross_entropy, alpha, 0.0)(net, data, extras)
        return dict(zip(names, torch.autograd.grad(loss, list(net.parameters())), strict=True))

    plain, guided = gradients(0.0), gradients(5.0)
    moved = {name for name in names if not torch.allclose(plain[name], guided[name])}
    assert moved == {"head.weight", "head.bias"}
    assert all(parameter.grad is None for parameter in generator.parameters())


def test_clients_leave_the_generator_as_it_is(play, clouds):
    run = play(FedGen(QUICK, STILL, **SMALL), clouds(*BOTH), rounds=2)
    learnt = [name for name in run.state.generator if "running" not in name and "tracked" not in name]
    for state in run.states[1:]:
        assert_close(
            {n: state.generator[n] for n in learnt}, {n: run.states[0].generator[n] for n in learnt}, **EXACTLY
        )


def test_no_averaging_is_refused_since_the_generator_is_trained_on_last_layers_that_clients_send():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages, found 'none'"):
        FedGen(sharing=Sharing("none"))


def test_last_layers_of_several_widths_are_refused_before_anybody_trains(play, clouds):
    with pytest.raises(ConfigError, match=r"^last layers read features of different widths: mlp2 8, wide2 16;"):
        play(FedGen(), clouds("mlp2", "wide2"))
    with pytest.raises(ValueError, match=r"^generator_training.batch_size: expected at least 2"):
        FedGen(generator_training=LocalTraining(batch_size=1))


def test_generators_start_from_weights_that_the_seed_determines(play, clouds):
    one, two, other = (play(FedGen(**SMALL), clouds("mlp2"), rounds=0, seed=seed).state.generator for seed in (0, 0, 1))
    assert_close(one, two, **EXACTLY)
    assert not torch.equal(one["layers.0.weight"], other["layers.0.weight"])
    assert weights_of(Generator(3, 4, 16, 8)).keys() == one.keys()
    assert parameters_of(Generator(3, 4, 16, 8)).keys() < one.keys()
