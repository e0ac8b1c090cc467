"""FedMK: condensing on a client by sums and differences, the server's losses, and who begins with whose knowledge."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in, isolated
from potluck.core.nets.weights import weights_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedmk import CondensationLoss, FedMK, Knowledge, KnowledgeLoss, RecognitionLoss
from potluck.parts.generator import likeness
from potluck.parts.inputs import InputGenerator

EXACTLY = {"rtol": 0, "atol": 0}
QUICK = LocalTraining(lr=0.01, steps=4, batch_size=8)
STILL = LocalTraining("sgd", lr=0.0, steps=1, batch_size=8)
NOTHING = Batch(torch.empty(0), torch.empty(0), {})


@pytest.fixture(autouse=True)
def isolated_draws():
    with isolated(fold_in(0, "test of fedmk")):
        yield


def small(**options):
    learner = LocalTraining("sgd", lr=0.1, steps=4, batch_size=8)
    trainings = {"training": QUICK, "server_training": learner, "generator_training": QUICK}
    return FedMK(**{**trainings, "per_class": 2, "noise": 4, "width": 4, **options})


def sent(run, exchange=-1):
    return run.wire.sent["condense"][exchange]


def replied(run, exchange=-1):
    return run.wire.replied["condense"][exchange]


def task(dtype=torch.float64):
    """A linear model, four synthetic inputs to condense with a copy of it, and five examples."""
    model = nn.Linear(2, 3).to(dtype).requires_grad_(False)
    knowledge = Knowledge(torch.randn(4, 2, dtype=dtype), torch.tensor([0, 0, 2, 1]), deepcopy(model))
    return model, knowledge, Batch(torch.randn(5, 2, dtype=dtype), torch.tensor([0, 1, 2, 2, 1]), {})


# Condensing


def test_condensation_loss__is_that_of_the_examples_after_a_step_on_the_knowledge_each_by_its_loss():
    model, knowledge, batch = task()
    found = CondensationLoss(1, 0.5, 3.0)(knowledge, batch, {})
    inputs, labels = knowledge.inputs.detach(), knowledge.labels
    with torch.no_grad():
        wrong = model(inputs).softmax(1) - F.one_hot(labels, 3)  # of softmax regression, by hand
        weight, bias = model.weight - 0.5 * wrong.T @ inputs / 4, model.bias - 0.5 * wrong.mean(0)
        by_hand = 0.0
        for x, y in zip(batch.inputs, batch.targets.tolist(), strict=True):
            loss = -(weight @ x + bias).log_softmax(0)[y]
            by_hand += (2 / (1 + torch.exp(3 * loss)) * loss / 5).item()
    assert found.item() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_condensation_loss__has_the_gradient_that_finite_differences_give_through_all_steps(steps):
    _, knowledge, batch = task()
    began = deepcopy(knowledge)
    objective = CondensationLoss(steps, 0.5, 0.0)
    objective(knowledge, batch, {}).backward()
    for at in ((0, 0), (3, 1)):
        values = []
        for shift in (1e-5, -1e-5):
            shifted = deepcopy(began)
            with torch.no_grad():
                shifted.inputs[at] += shift
            values.append(objective(shifted, batch, {}).item())
        assert knowledge.inputs.grad is not None
        assert knowledge.inputs.grad[at].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)
    assert all(weight.grad is None for weight in knowledge.model.parameters())


def test_condensation_loss__moves_the_model_along_so_that_the_next_step_starts_where_this_one_ended():
    model, knowledge, batch = task()
    twice, at_once = deepcopy(knowledge), deepcopy(knowledge)
    for _ in range(2):
        found = CondensationLoss(1, 0.5, 0.0)(twice, batch, {})
    assert_close(found, CondensationLoss(2, 0.5, 0.0)(at_once, batch, {}))
    assert_close(twice.model.state_dict(), at_once.model.state_dict())
    optimizer = torch.optim.SGD(deepcopy(model).requires_grad_().parameters(), lr=0.5)
    (copied,) = [group["params"] for group in optimizer.param_groups]
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(F.linear(knowledge.inputs.detach(), *copied), knowledge.labels).backward()
        optimizer.step()
    assert_close(list(twice.model.parameters()), copied, check_stride=False)


def test_condensation_loss__weights_of_examples_have_no_gradient():
    _, knowledge, batch = task()
    began = deepcopy(knowledge)
    CondensationLoss(1, 0.5, 2.0)(knowledge, batch, {}).backward()
    found, total = knowledge.inputs.grad, torch.zeros(4, 2, dtype=torch.float64)
    for i in range(5):
        alone = Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1], {})
        again = deepcopy(began)
        loss = CondensationLoss(1, 0.5, 0.0)(again, alone, {})
        share = 2 / (1 + (2 * loss).exp()).item()
        total += share * torch.autograd.grad(loss, again.inputs)[0] / 5
    assert_close(found, total)


def test_a_model_that_learns_from_uploads_fits_the_clients_own_examples_and_not_from_where_they_began(play, clouds):
    federation = clouds("mlp2", sizes=(60,))
    losses = []
    for training in (STILL, LocalTraining(lr=0.01, steps=40, batch_size=60)):
        run = play(small(training=training, per_class=4), federation)
        reply, model = replied(run)[0], run.engine.server(1).build("mlp2")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(10):
            optimizer.zero_grad()
            F.cross_entropy(model(reply["inputs"]), reply["labels"]).backward()
            optimizer.step()
        examples = federation.sites[0].train.batch(torch.arange(60))
        losses.append(F.cross_entropy(model(examples.inputs), examples.targets).item())
    assert losses[1] < losses[0] - 0.1


def test_a_client_measures_batch_norm_on_its_own_examples_before_it_is_evaluated(play, clouds):
    federation = clouds("norm2", "norm2")
    run = play(small(), federation)
    models = [run.model(id) for id in (0, 1)]
    means = [next(buffer for name, buffer in net.named_buffers() if name.endswith("running_mean")) for net in models]
    for net, mean, site in zip(models, means, federation.sites.values(), strict=True):
        linear = next(module for module in net.modules() if isinstance(module, nn.Linear))
        assert_close(mean, linear(site.train.batch(torch.arange(len(site.train))).inputs).mean(0).detach())
    assert not torch.equal(*means)
    assert_close(dict(models[0].named_parameters()), dict(models[1].named_parameters()), **EXACTLY)


def test_uploads_have_as_many_inputs_of_each_class_that_the_client_holds_and_no_others(play, clouds):
    run = play(small(), clouds("mlp2", "mlp3", labels=((0,), (2, 1))))
    for id, labels in ((0, [0, 0]), (1, [1, 1, 2, 2])):
        assert replied(run)[id]["labels"].tolist() == labels
        assert replied(run)[id]["inputs"].shape == (len(labels), 6)
        assert set(replied(run)[id]) == {"inputs", "labels"}  # no weights
    assert run.kept(0) == {"state": {}}


# Sharing


def test_a_client_begins_with_what_others_have_sent_and_with_its_own_only_where_no_other_has(play, clouds):
    federation = clouds("mlp2", "mlp2", "mlp2", labels=((0, 1), (1, 2), (2,)))
    run = play(small(training=STILL), federation, rounds=2)
    first = replied(run, 0)
    assert all(len(message["inputs"]) == len(message["labels"]) == 0 for message in sent(run, 0).values())

    def rows(message, label):
        return message["inputs"][message["labels"] == label]

    # Of class 1 only each other's; of class 2 client 0 may get anybody's; of class 0 its owner gets its own.
    assert torch.equal(rows(sent(run)[0], 1), rows(first[1], 1))
    assert torch.equal(rows(sent(run)[1], 1), rows(first[0], 1))
    assert any(torch.equal(rows(sent(run)[0], 2), rows(first[i], 2)) for i in (1, 2))
    assert torch.equal(rows(sent(run)[0], 0), rows(first[0], 0))
    assert sent(run)[0]["labels"].tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(rows(sent(run)[1], 2), rows(first[2], 2))
    assert torch.equal(rows(sent(run)[2], 2), rows(first[1], 2))
    for id, label in ((0, 1), (1, 1), (1, 2), (2, 2)):  # nothing was trained: what comes back is where it began
        assert torch.equal(rows(replied(run)[id], label), rows(sent(run)[id], label))


def test_a_newcomer_begins_with_what_clients_of_earlier_rounds_have_sent(play, clouds):
    run = play(small(), clouds("mlp2", "mlp3"), rounds=0)
    run.round(0)
    run.round(1)
    assert torch.equal(sent(run)[1]["inputs"], replied(run, 0)[0]["inputs"])
    assert set(run.state.knowledge) == {"0", "1"}
    assert torch.equal(run.state.knowledge["0"]["inputs"], replied(run, 0)[0]["inputs"])


def test_noise_is_where_everybody_begins_if_so_told(play, clouds):
    run = play(small(initial="noise", training=STILL), clouds("mlp2", "mlp2"), rounds=2)
    assert all(len(message["inputs"]) == len(message["labels"]) == 0 for message in sent(run).values())


# The server


def test_knowledge_loss__is_that_of_uploads_and_of_as_many_generated_inputs_of_the_same_labels():
    net, generator = nn.Linear(6, 3), InputGenerator(3, 4, (6,), width=2).eval()
    batch = Batch(torch.randn(4, 6), torch.tensor([0, 1, 1, 2]), {})
    with isolated(fold_in(1)):
        found = KnowledgeLoss(2.0)(net, batch, {"generator": generator})
    with isolated(fold_in(1)):
        made, _ = generator.drawn(batch.targets)
    uploads, generated = (F.cross_entropy(net(x), batch.targets) for x in (batch.inputs, made))
    assert_close(found, uploads + 2 * generated)
    assert_close(KnowledgeLoss(0.0)(net, batch, {"generator": generator}), uploads)
    found.backward()
    assert all(weight.grad is None for weight in generator.parameters())


def test_recognition_loss__is_the_mean_over_models_and_the_likeness_of_what_is_generated():
    models, generator = nn.ModuleList(nn.Linear(6, 3) for _ in range(2)), InputGenerator(3, 4, (6,), width=2)
    labels = torch.tensor([0, 1, 1, 2])
    with isolated(fold_in(1)):
        found = RecognitionLoss(3.0)(generator, Batch(labels, labels, {}), {"models": models})
    with isolated(fold_in(1)):
        x, noise = generator.drawn(labels)
    by_hand = (F.cross_entropy(models[0](x), labels) + F.cross_entropy(models[1](x), labels)) / 2
    assert_close(found, by_hand + 3 * likeness(x, noise))


def test_the_generator_is_trained_kept_and_used_from_the_second_round_on(play, clouds):
    run = play(small(), clouds("mlp2", "mlp2"), rounds=2)
    names = [name for name in run.state.generator if "weight" in name]
    for before, after in zip(run.states, run.states[1:], strict=False):
        assert all(not torch.equal(before.generator[name], after.generator[name]) for name in names)
    forgetful = play(small(), clouds("mlp2", "mlp2"), rounds=1)
    assert_close(forgetful.state.weights, run.states[1].weights, **EXACTLY)
    new = forgetful.states[0].generator
    forgetful.states[-1] = type(forgetful.state)(forgetful.state.weights, new, forgetful.state.knowledge)
    forgetful.round()
    assert not torch.equal(forgetful.state.weights["mlp2"]["head.weight"], run.state.weights["mlp2"]["head.weight"])


def test_the_generator_learns_to_be_recognised_by_the_servers_models(play, clouds):
    learner, strong = LocalTraining("sgd", lr=0.5, steps=40, batch_size=8), LocalTraining(lr=0.02, steps=60)
    run = play(small(server_training=learner, generator_training=strong), clouds("mlp2", "mlp3"))
    labels, noise, losses = torch.arange(60) % 3, torch.randn(60, 4), []
    for weights in (run.states[0].generator, run.state.generator):
        net = InputGenerator(3, 4, (6,), 4).eval()
        net.load_state_dict(weights)
        losses.append(sum(F.cross_entropy(run.model(id)(net(labels, noise)), labels).item() for id in (0, 1)))
    assert losses[1] < 0.5 * losses[0]


def test_the_server_trains_a_model_of_each_architecture_on_all_uploads_whoever_was_drawn(play, clouds):
    run = play(small(), clouds("mlp2", "mlp3"), rounds=0)
    before = run.state.weights
    run.round(0)
    for p in ("mlp2", "mlp3"):
        assert not torch.equal(before[p]["head.weight"], run.state.weights[p]["head.weight"])
        assert_close(weights_of(run.model(0 if p == "mlp2" else 1)), dict(run.state.weights[p]), **EXACTLY)


def test_models_learn_from_uploads_alone(play, clouds):
    federation = clouds("mlp2", "mlp2", "mlp2", sizes=(30, 30, 30), labels=((0, 1), (1, 2), (0, 2)))
    learner = LocalTraining("sgd", lr=0.1, steps=30, batch_size=16)
    condensing = LocalTraining(lr=0.01, steps=20, batch_size=30)
    options = {"training": condensing, "server_training": learner, "per_class": 5, "pseudo": 0.0}
    run = play(small(**options), federation, 2)
    net, right = run.model(1).eval(), 0
    for site in federation.sites.values():
        batch = site.train.batch(torch.arange(30))
        right += int((net(batch.inputs).argmax(1) == batch.targets).sum())
    assert right > 45  # of 90, with three classes


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"^server_training.batch_size: expected at least 2"):
        FedMK(server_training=LocalTraining(batch_size=1))
    with pytest.raises(ConfigError, match=r"^generator_training.batch_size: expected at least 2"):
        FedMK(generator_training=LocalTraining(batch_size=1))
    with pytest.raises(ConfigError, match="per_class"):
        FedMK(per_class=1)


def test_an_optimiser_that_lasts_is_refused_since_its_moments_are_of_other_inputs():
    with pytest.raises(ConfigError, match=r"^training\.persist: expected False, since every round trains other inputs"):
        FedMK(LocalTraining(persist=True))
