"""FedL2G: the guided loss, the quiz and its gradient in the vectors, and who learns what when."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import Site
from potluck.core.ground.rng import Key
from potluck.core.needs import Need
from potluck.core.nets.weights import parameters_of, weights_of
from potluck.core.requests.beside_training import Gradient
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import LocalTraining
from potluck.engine.client.requests import carry_out
from potluck.engine.numerics.numerics import PLAIN
from potluck.methods.fedl2g import FedL2G, GuidedLoss, QuizLoss
from potluck.parts.derivatives import TWICE
from potluck.parts.features import ONE_ROW
from potluck.parts.heads import COMMON_WIDTH

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=64)  # three full steps
SMALL = {"study": 8, "quiz": 4}
CLASSES = 3


def sent(run, exchange=-1):
    return run.wire.sent["local_update"][exchange]


def replied(run, exchange=-1):
    return run.wire.replied["local_update"][exchange]


def divided(run, federation, id):
    """A client's own examples and its quiz, in the order of its data."""
    train, held = federation.sites[id].train, torch.zeros(len(federation.sites[id].train), dtype=torch.bool)
    held[run.kept(id)["state"]["quiz"]] = True
    return train.take((~held).nonzero().flatten()), train.take(held.nonzero().flatten())


def whole(examples):
    return examples.batch(torch.arange(len(examples)))


def quiz_loss(net, guide, study, quiz, rate, strength=1.0):
    """The loss on the quiz after one guided step on the study, for logits, step by step."""
    tried = copy.deepcopy(net).train()
    logits = tried(study.inputs)
    loss = F.cross_entropy(logits, study.targets) + strength * ((logits - guide[study.targets]) ** 2).mean()
    gradients = torch.autograd.grad(loss, list(tried.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(tried.parameters(), gradients, strict=True):
            parameter -= rate * gradient
        return F.cross_entropy(tried(quiz.inputs), quiz.targets)


def gradient_of(net, guide, study, quiz, loss, rate=0.3):
    """The engine's gradient of the quiz in the vectors."""
    pair = nn.ModuleDict({"model": net, "guide": nn.Embedding.from_pretrained(guide, freeze=False)})
    request = Gradient(pair, QuizLoss(loss, rate), Examples(study.inputs, study.targets), {"quiz": quiz})
    return carry_out(request, Key((0,)), PLAIN)


def small_net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(dtype)


def two_batches(dtype=torch.float64):
    torch.manual_seed(1)
    study = Batch(torch.randn(5, 4, dtype=dtype), torch.tensor([0, 0, 1, 1, 0]), {})
    return study, Batch(torch.randn(3, 4, dtype=dtype), torch.tensor([0, 1, 2]), {})


# The losses


@pytest.mark.parametrize("guided", ["logits", "features"])
def test_guided_loss__adds_the_mean_squared_distance_to_the_vector_of_the_class(guided, clouds):
    federation = clouds("mlp2")
    net, batch = federation.build(None, Key((0,))), whole(federation.sites[0].train)
    h = net.pool(net.stages(batch.inputs))
    out = net.head(h) if guided == "logits" else h
    guide = torch.randn(CLASSES, out.shape[1], generator=torch.Generator().manual_seed(0))
    gap = sum(((out[i] - guide[y]) ** 2).sum().item() for i, y in enumerate(batch.targets)) / out.numel()
    expected = F.cross_entropy(net.head(h), batch.targets).item() + 0.7 * gap
    found = GuidedLoss(F.cross_entropy, guided, 0.7)(net, batch, {"guide": guide})
    assert_close(found.item(), expected, rtol=1e-5, atol=0)


def test_quiz_loss__is_the_tasks_loss_after_a_guided_step():
    net, (study, quiz) = small_net(), two_batches()
    guide = torch.randn(CLASSES, CLASSES, dtype=torch.float64)
    pair = nn.ModuleDict({"model": net, "guide": nn.Embedding.from_pretrained(guide, freeze=False)})
    found = QuizLoss(GuidedLoss(F.cross_entropy, "logits", 2.0), 0.3)(pair, study, {"quiz": quiz})
    assert_close(found.detach(), quiz_loss(net, guide, study, quiz, 0.3, strength=2.0))


def test_quiz_loss__has_the_gradient_of_its_value_in_the_vectors_and_none_in_the_model():
    net, (study, quiz) = small_net(), two_batches()
    guide = torch.randn(CLASSES, CLASSES, dtype=torch.float64)
    found = gradient_of(net, guide, study, quiz, GuidedLoss(F.cross_entropy, "logits", 1.0))
    for row in range(CLASSES):
        for column in range(CLASSES):
            ends = []
            for sign in (1, -1):
                moved = guide.clone()
                moved[row, column] += sign * 1e-5
                ends.append(quiz_loss(net, moved, study, quiz, 0.3))
            slope = (ends[0] - ends[1]) / 2e-5
            assert_close(found["guide.weight"][row, column], slope, rtol=1e-5, atol=1e-9)
    assert not found["guide.weight"][2].any()  # no example to study is of this class
    assert found["guide.weight"][:2].abs().min() > 1e-6
    assert not any(gradient.any() for name, gradient in found.items() if name.startswith("model"))


def test_quiz_loss__of_one_weight_by_hand():
    """Logits (w x, 0): theta' = w - eta (dCE/dw + (w x - v_y) x), as MSE is the mean of two; d theta'/dv = eta x."""

    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def forward(self, x):
            return torch.cat([self.w * x, 0 * x], 1)

    x, y, eta = 2.0, 0, 0.1
    study = Batch(torch.tensor([[x]], dtype=torch.float64), torch.tensor([y]), {})
    quiz = Batch(torch.tensor([[3.0]], dtype=torch.float64), torch.tensor([1]), {})
    guide = torch.tensor([[4.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    p = 1 / (1 + torch.exp(torch.tensor(-0.5 * x, dtype=torch.float64)))  # of class 0
    after = 0.5 - eta * ((p - 1) * x + (0.5 * x - 4.0) * x)
    wrong = 1 / (1 + torch.exp(-3.0 * after))  # of class 0, where the quiz says 1
    found = gradient_of(Line(), guide, study, quiz, GuidedLoss(F.cross_entropy, "logits", 1.0), rate=eta)
    expected = torch.zeros(2, 2, dtype=torch.float64)
    expected[0, 0] = wrong * 3.0 * eta * x
    assert_close(found["guide.weight"], expected)


class Attending(nn.Module):
    """Torch's fused attention, and a weight that nothing reads."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(1, 12), nn.Linear(16, CLASSES)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x):
        query, key, value = self.qkv(x[:, None, :, None]).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(query, key, value).flatten(1))


def test_quiz_loss__goes_through_fused_attention_and_past_weights_that_nothing_reads():
    torch.manual_seed(0)
    net, (study, quiz) = Attending(), two_batches(torch.float32)
    (first,) = torch.autograd.grad(net(study.inputs).sum(), net.qkv.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="attention"):  # what torch's own choice of a kernel comes to
        torch.autograd.grad(first.sum(), net.qkv.weight)
    found = gradient_of(net, torch.zeros(CLASSES, CLASSES), study, quiz, GuidedLoss(F.cross_entropy, "logits", 1.0))
    assert found["guide.weight"][:2].abs().min() > 0


# Clients


@pytest.mark.parametrize("guided", ["logits", "features"])
def test_local_training_descends_the_guided_loss_on_all_but_the_quiz(guided, play, clouds):
    federation = clouds("mlp2", "mlp3")
    run = play(FedL2G(FULL, guided, strength=2.0, **SMALL), federation)
    nets = [run.model(id) for id in (0, 1)]
    run.round()
    for id, net in enumerate(nets):
        guide, (own, quiz) = sent(run)[id]["guide"], divided(run, federation, id)
        assert (len(own), len(quiz)) == (len(federation.sites[id].train) - 4, 4)
        for _ in range(3):
            h = net.pool(net.stages(own.inputs[own.rows]))
            out = net.head(h) if guided == "logits" else h
            loss = F.cross_entropy(net.head(h), own.labels)
            loss = loss + 2.0 * ((out - guide[own.labels]) ** 2).mean()
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
        assert_close(parameters_of(run.model(id)), parameters_of(net))


def test_the_quiz_is_never_trained_on_and_judges_the_vectors(play, clouds):
    federation = clouds("norm2")
    plain = play(FedL2G(FULL, **SMALL), federation)
    gradients, weights = replied(plain)[0]["gradients"], weights_of(plain.model(0))
    train = federation.sites[0].train
    inputs = train.inputs.clone()
    inputs[plain.kept(0)["state"]["quiz"]] *= -3.0
    changed = Examples(inputs, train.targets)
    other = play(FedL2G(FULL, **SMALL), replace(federation, sites={0: Site(0, "norm2", changed, changed, changed)}))
    assert_close(weights_of(other.model(0)), weights, **EXACTLY)
    assert not torch.allclose(replied(other)[0]["gradients"], gradients, rtol=0.1)


def test_a_client_has_one_quiz_for_the_whole_run_and_studies_others_each_time(play, clouds):
    federation = clouds("mlp2", sizes=(40,))
    run = play(FedL2G(STILL, server_rate=0.0, **SMALL), federation, rounds=1)
    quiz = run.kept(0)["state"]["quiz"]
    run.round()
    assert_close(run.kept(0)["state"]["quiz"], quiz, **EXACTLY)
    assert len(quiz.unique()) == 4
    one, two = (replied(run, exchange)[0] for exchange in (0, 1))  # of the same vectors and the same model
    assert not torch.equal(one["gradients"], two["gradients"])


def test_clients_report_the_gradient_at_their_trained_networks_and_of_classes_that_they_studied(play, clouds):
    federation = clouds("mlp2", "mlp3", labels=((0, 2), (0, 1, 2)))
    run = play(FedL2G(FULL, study=64, quiz=4, study_rate=0.2), federation)
    for id, reply in replied(run).items():
        own, quiz = (whole(part) for part in divided(run, federation, id))
        loss = GuidedLoss(F.cross_entropy, "logits", 1.0)
        expected = gradient_of(run.model(id), run.states[0].guide, own, quiz, loss, rate=0.2)["guide.weight"]
        assert reply["studied"].tolist() == own.targets.unique().tolist()
        assert_close(reply["gradients"], expected[reply["studied"]])


def test_a_client_reports_only_the_classes_of_the_examples_that_it_studied(play, clouds):
    run = play(FedL2G(FULL, study=2, quiz=4), clouds("mlp2", "mlp3", sizes=(40, 40)), rounds=3)
    for exchange in range(3):
        assert all(1 <= len(reply["studied"]) <= 2 for reply in replied(run, exchange).values())


def test_neither_study_nor_quiz_is_augmented(play, clouds):
    plain = clouds("mlp2")
    site = plain.sites[0]
    train = replace(site.train, preprocess=lambda inputs, rng: inputs if rng is None else 100 * inputs)
    augmented = replace(plain, sites={0: replace(site, train=train)})
    one, other = (replied(play(FedL2G(STILL, **SMALL), federation))[0] for federation in (plain, augmented))
    assert_close(one["gradients"], other["gradients"], **EXACTLY)


@pytest.mark.parametrize(("size", "quiz"), [(3, 0), (4, 2), (5, 2), (12, 4)])
def test_the_quiz_is_at_most_half_and_there_is_none_without_a_batch_for_each(size, quiz, play, clouds):
    federation = clouds("norm2", sizes=(size,))
    run = play(FedL2G(FULL, **SMALL), federation)
    assert len(run.kept(0)["state"]["quiz"]) == quiz
    assert (len(replied(run)[0]["studied"]) > 0) == (quiz > 0)
    assert torch.equal(run.state.guide, run.states[0].guide) == (quiz == 0)


def test_in_the_warm_up_vectors_learn_and_clients_stay_as_they_are(play, clouds):
    run = play(FedL2G(FULL, warm_up=1, **SMALL), clouds("norm2", "norm3"), rounds=0)
    before = [weights_of(run.model(id)) for id in (0, 1)]
    run.round()
    assert not torch.equal(run.state.guide, run.states[0].guide)
    assert_close([weights_of(run.model(id)) for id in (0, 1)], before, **EXACTLY)  # running statistics too
    run.round()
    assert not torch.equal(parameters_of(run.model(0))["head.weight"], before[0]["head.weight"])


# The server


def test_the_server_steps_against_the_mean_of_the_gradients_of_those_who_studied_a_class(play, clouds):
    labels = ((0, 1), (1, 0), (1,))
    run = play(FedL2G(FULL, server_rate=3.0, **SMALL), clouds("mlp2", "mlp3", "norm2", labels=labels), rounds=2)
    rows = {c: [] for c in range(CLASSES)}
    for reply in replied(run).values():
        for label, gradient in zip(reply["studied"].tolist(), reply["gradients"], strict=True):
            rows[label].append(gradient)
    assert [len(rows[label]) for label in range(CLASSES)] == [2, 3, 0]
    expected = run.states[1].guide.clone()
    for label in (0, 1):
        expected[label] -= 3.0 * sum(rows[label]) / len(rows[label])
    assert_close(run.state.guide, expected)
    assert_close(run.state.guide[2], run.states[0].guide[2], **EXACTLY)
    assert_close(sent(run)[2]["guide"], run.states[1].guide, **EXACTLY)


@pytest.mark.parametrize(("guided", "rate"), [("logits", 20.0), ("features", 200.0)])
def test_vectors_come_to_help_with_the_quiz(guided, rate, play, clouds):
    """A step that they guide leaves a lower loss, the more so the longer they have learnt."""
    federation = clouds("mlp2", sizes=(20,))
    method = FedL2G(STILL, guided, server_rate=rate, study_rate=0.3, study=64, quiz=8)
    run = play(method, federation, rounds=10)
    own, quiz = (whole(part) for part in divided(run, federation, 0))
    losses = []
    for state in (run.states[0], run.states[5], run.states[10]):
        pair = nn.ModuleDict({"model": run.model(0), "guide": nn.Embedding.from_pretrained(state.guide)})
        losses.append(QuizLoss(GuidedLoss(F.cross_entropy, guided, 1.0), 0.3)(pair, own, {"quiz": quiz}).item())
    assert losses[2] < losses[1] < losses[0] - 0.01


def test_vectors_begin_as_draws_of_the_runs_seed_from_the_standard_normal(play, clouds):
    federation = replace(clouds("mlp2"), num_classes=CLASSES)
    one, same, other = (play(FedL2G(**SMALL), federation, seed=seed).states[0].guide for seed in (0, 0, 1))
    assert_close(one, same, **EXACTLY)
    assert not torch.equal(one, other)
    wide = play(FedL2G(guided="features", **SMALL), federation).states[0].guide
    assert wide.shape == (CLASSES, 8)
    assert 0.6 < wide.std() < 1.4


def test_a_newcomer_with_an_architecture_nobody_had_is_guided_and_adds_its_gradient(play, clouds):
    run = play(FedL2G(FULL, **SMALL), clouds("mlp2", "mlp2", "wide2"), rounds=0)
    run.round(0, 1)
    untouched = weights_of(run.model(2))
    run.round(2)
    assert_close(sent(run)[2]["guide"], run.states[1].guide, **EXACTLY)
    assert not torch.equal(run.state.guide, run.states[1].guide)
    assert not torch.equal(weights_of(run.model(2))["head.weight"], untouched["head.weight"])


def test_needs_and_ranges():
    assert FedL2G().needs() == {Need.CLASSES, TWICE}
    assert FedL2G(guided="features").needs() == {Need.CLASSES, TWICE, Need.SPLIT_MODEL, ONE_ROW, COMMON_WIDTH}
    for options, expected in (
        ({"strength": -1.0}, "strength: expected at least 0"),
        ({"study_rate": 0.0}, "study_rate: expected above 0"),
        ({"quiz": 1}, "quiz: expected at least 2"),
        ({"guided": "prototypes"}, "guided: expected"),
    ):
        with pytest.raises(ValueError, match=expected):
            replace(FedL2G(), **options)


def test_what_a_client_trains_with_beside_its_quiz_has_a_loss(play, clouds):
    run = play(FedL2G(warm_up=1), clouds("mlp2"), rounds=2)
    assert run.reports[0].loss_local is None
    assert run.reports[1].loss_local > 0
