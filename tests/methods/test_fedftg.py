"""FedFTG: samples that clients recognise and the average does not, and what the average learns from them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key, fold_in, isolated
from potluck.core.nets.weights import load, weights_of
from potluck.core.requests.beside_training import Gradient
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import LocalTraining
from potluck.engine.client.requests import carry_out
from potluck.engine.numerics.numerics import PLAIN
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedftg import FedFTG, FineTuning, HardSamples
from potluck.parts.generator import likeness
from potluck.parts.inputs import InputGenerator
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
QUICK = LocalTraining("sgd", lr=0.1, batch_size=8)
SMALL = {"noise": 4, "width": 4}
SHARES = torch.tensor([[1.0, 0.25, 0.0], [0.0, 0.75, 1.0]])
LABELS = torch.tensor([0, 1, 1, 2, 2, 2])


@pytest.fixture(autouse=True)
def isolated_draws():
    with isolated(fold_in(0, "test of fedftg")):
        yield


def small(**options):
    tuning = LocalTraining("sgd", lr=0.1, steps=4, batch_size=8)
    return FedFTG(**{"training": QUICK, "server_training": tuning, **SMALL, **options})


def nets(students=1):
    """A generator of five numbers, linear students, and two linear clients."""
    learn = nn.ModuleDict({"generator": InputGenerator(3, 4, (5,), width=2)})
    learn["students"] = nn.ModuleList(nn.Linear(5, 3) for _ in range(students))
    return learn, nn.ModuleList(nn.Linear(5, 3) for _ in range(2))


def hard(method, client=0, students=1):
    learn, teachers = nets(students)
    z = torch.randn(6, 4)
    loss = HardSamples(client, method, 2)(learn, Batch(z, LABELS, {}), {"teachers": teachers, "shares": SHARES})
    with torch.no_grad():
        learn.train()
        x = learn["generator"](LABELS, z)
    return loss.item(), x, z, teachers[client](x), torch.stack([s(x) for s in learn["students"]])


# The generator


@pytest.mark.parametrize("client", [0, 1])
def test_hard_samples__are_recognised_and_disputed_by_the_clients_share_of_each_class(client):
    found, x, z, logits, students = hard(FedFTG(hardness=3.0, recognition=2.0, diversity=5.0), client)
    by_hand = 0.0
    for i, label in enumerate(LABELS.tolist()):
        missed = -logits[i].log_softmax(0)[label].item()
        gap = sum(abs(students[0, i, c].item() - logits[i, c].item()) for c in range(3)) / 3
        by_hand += SHARES[client, label].item() * (2 * missed - 3 * gap) / 6
    assert found == pytest.approx(by_hand + 5 * likeness(x, z).item() / 2, rel=1e-5)


def test_hard_samples__by_batch_lose_the_class_weights_as_in_the_released_code():
    plain = {"hardness": 0.0, "diversity": 0.0}
    found, _, _, logits, _ = hard(FedFTG(class_weights="batch", **plain))
    assert found == pytest.approx((SHARES[0][LABELS].mean() * F.cross_entropy(logits, LABELS)).item(), rel=1e-5)
    with isolated(fold_in(0, "test of fedftg")):
        ours, *_ = hard(FedFTG(**plain))
    assert abs(ours - found) > 1e-3


def test_hard_samples__of_several_students_are_those_on_which_they_disagree_on_average():
    found, _, _, logits, students = hard(FedFTG(recognition=0.0, diversity=0.0), students=3)
    gaps = (students - logits).abs().mean(2).mean(0)
    assert found == pytest.approx(-(SHARES[0][LABELS] * gaps).mean().item(), rel=1e-5)


def test_hard_samples__a_step_of_the_generator_makes_them_harder_and_better_recognised():
    for weights, term in (({"recognition": 0.0}, "gap"), ({"hardness": 0.0}, "missed")):
        learn, teachers = nets()
        z = torch.randn(6, 4)
        optimizer = torch.optim.SGD(learn["generator"].parameters(), lr=0.05)

        def measured(learn=learn, z=z, teachers=teachers):
            x = learn["generator"](LABELS, z)
            gap = (learn["students"][0](x) - teachers[1](x)).abs().mean(1)
            missed = F.cross_entropy(teachers[1](x), LABELS, reduction="none")
            return {"gap": (SHARES[1][LABELS] * gap).sum().item(), "missed": (SHARES[1][LABELS] * missed).sum().item()}

        before = measured()
        loss = HardSamples(1, FedFTG(diversity=0.0, **weights), 2)
        for _ in range(20):
            optimizer.zero_grad()
            loss(learn, Batch(z, LABELS, {}), {"teachers": teachers, "shares": SHARES}).backward()
            optimizer.step()
        assert (measured()[term] - before[term]) * (1 if term == "gap" else -1) > 0.05, term


# The student


def test_fine_tuning__draws_a_student_to_the_clients_predictions_by_their_shares_of_the_class():
    learn, teachers = nets()
    z, extras = torch.randn(6, 4), {"teachers": teachers, "shares": SHARES}
    found, seen = FineTuning("batchmean")(learn, Batch(z, LABELS, {}), extras)
    with torch.no_grad():
        x = learn["generator"].eval()(LABELS, z)
    by_hand = 0.0
    for i, label in enumerate(LABELS.tolist()):
        taught = sum(SHARES[k, label] * teachers[k](x[i]).softmax(0) for k in range(2))
        assert taught.sum().item() == pytest.approx(1)
        by_hand -= (taught * learn["students"][0](x[i]).log_softmax(0)).sum().item() / 6
    assert found.item() == pytest.approx(by_hand, rel=1e-5)
    assert_close(seen["loss"], found.detach().expand(6))
    learn["generator"].train()
    by_entries, _ = FineTuning("mean")(learn, Batch(z, LABELS, {}), extras)
    assert by_entries.item() == pytest.approx(by_hand / 3, rel=1e-5)


def test_fine_tuning__has_the_gradient_that_finite_differences_give():
    learn, teachers = (net.double() for net in nets())
    extras = {"teachers": teachers, "shares": SHARES.double()}
    data = Examples(torch.randn(6, 4, dtype=torch.float64), LABELS)
    loss = FineTuning("batchmean")
    learn["generator"].eval()
    gradient = carry_out(Gradient(learn, loss, data, extras), Key((0,)), PLAIN)["students.0.weight"]
    weight = learn["students"][0].weight
    for at in ((0, 0), (2, 4)):
        values = []
        for shift in (1e-5, -1e-5):
            with torch.no_grad():
                weight[at] += shift
                values.append(loss(learn, data.batch(torch.arange(6)), extras)[0].item())
                weight[at] -= shift
        assert gradient[at].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_fine_tuning__leaves_the_generator_and_the_clients_alone():
    learn, teachers = nets()
    before = weights_of(learn["generator"]), weights_of(teachers)
    extras = {"teachers": teachers, "shares": SHARES}
    FineTuning("batchmean")(learn, Batch(torch.randn(6, 4), LABELS, {}), extras)[0].backward()
    assert all(weight.grad is None for weight in learn["generator"].parameters())
    assert_close((weights_of(learn["generator"]), weights_of(teachers)), before, **EXACTLY)


# A round


def test_the_generator_is_trained_kept_and_used(play, clouds):
    run = play(small(), clouds("mlp2", "mlp2"), rounds=2)
    names = [name for name in run.states[0].generator if "weight" in name]
    for before, after in zip(run.states, run.states[1:], strict=False):
        assert all(not torch.equal(before.generator[name], after.generator[name]) for name in names)
    forgetful = play(small(), clouds("mlp2", "mlp2"), rounds=1)
    forgetful.states[-1] = type(forgetful.state)(forgetful.state.weights, forgetful.states[0].generator)
    forgetful.round()
    assert not torch.equal(forgetful.state.weights["mlp2"]["head.weight"], run.state.weights["mlp2"]["head.weight"])
    asleep = play(small(generator_training=LocalTraining("sgd", lr=0.0)), clouds("mlp2", "mlp2"))
    assert not torch.equal(asleep.state.weights["mlp2"]["head.weight"], run.states[1].weights["mlp2"]["head.weight"])
    assert run.kept(0) == {"state": {}}
    assert run.reports[-1].notes["distillation_loss"] > 0


def test_the_generator_finds_what_the_average_gets_wrong(play, clouds):
    """Trained on one round's clients, samples are recognised by those that hold their class."""
    strong = {"generator_training": LocalTraining(lr=0.02), "student_steps": 1}
    still = LocalTraining("sgd", lr=0.0, steps=60, batch_size=8)
    federation = clouds("mlp2", "mlp2", labels=((0, 1), (1, 2)))
    local = LocalTraining("sgd", lr=0.5, epochs=20, batch_size=8)
    run = play(small(training=local, server_training=still, **strong), federation)
    clients = [load(run.engine.server(1).build("mlp2"), reply["weights"])
               for reply in run.wire.replied["local_update"][0].values()]  # fmt: skip
    labels = torch.tensor([0, 2]).repeat(30)
    noise = torch.randn(60, 4)
    gaps = []
    for weights in (run.states[0].generator, run.state.generator):
        net = load(run.engine.server(1).module("generator", lambda: InputGenerator(3, 4, (6,), 4)), weights).eval()
        with torch.no_grad():
            x = net(labels, noise)
            holder = torch.where((labels == 0)[:, None], clients[0](x), clients[1](x))
            gaps.append(F.cross_entropy(holder, labels).item())
    assert gaps[1] < 0.5 * gaps[0]


@pytest.mark.usefixtures("uncounted")
def test_samples_have_only_classes_that_a_client_of_the_round_holds(play, clouds, monkeypatch):
    seen = []
    plain = FineTuning.__call__

    def watched(self, net, batch, extras):
        seen.append((batch, extras))
        return plain(self, net, batch, extras)

    monkeypatch.setattr(FineTuning, "__call__", watched)
    play(small(), clouds("mlp2", "mlp2", labels=((0,), (0, 1))))
    assert {label for batch, _ in seen for label in batch.targets.tolist()} == {0, 1}
    assert all(torch.equal(extras["shares"].sum(0), torch.tensor([1.0, 1.0, 0.0])) for _, extras in seen)
    assert len(seen) == 4 * 5


def test_one_client_alone_teaches_what_it_sent_and_so_changes_nothing(play, clouds):
    tuned, plain = (play(method, clouds("mlp2")) for method in (small(), FedAvg(QUICK, Sharing("architecture"))))
    assert_close(tuned.state.weights, plain.state.weights)


def test_fine_tuning_keeps_the_statistics_of_the_average_and_moves_the_weights_of_those_who_were_drawn(play, clouds):
    federation = clouds("norm2", "norm3", "norm2", "norm3")
    tuned, plain = (play(method, federation, rounds=0) for method in (small(), FedAvg(QUICK, Sharing("architecture"))))
    for run in (tuned, plain):
        run.round(0, 2)  # nobody has norm3, which stays as it is
    for p, averaged in plain.state.weights.items():
        for name, tensor in averaged.items():
            same = torch.equal(tensor, tuned.state.weights[p][name])
            if p == "norm3" or "running" in name or "tracked" in name:
                assert same, (p, name)
            elif "weight" in name:  # a bias before BatchNorm has no gradient
                assert not same, (p, name)


def test_a_newcomer_starts_from_the_fine_tuned_student(play, clouds):
    run = play(small(), clouds("mlp2", "mlp2"), rounds=0)
    run.round(0)
    run.round(0, 1)
    for message in run.wire.sent["local_update"][1].values():
        assert_close({**message["weights"]}, run.states[1].weights["mlp2"], **EXACTLY)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"^sharing.scope: expected 'architecture'"):
        FedFTG(sharing=Sharing("layer"))
    with pytest.raises(ConfigError, match=r"^sharing.buffers: expected 'average'"):
        FedFTG(sharing=Sharing("architecture", buffers="local"))
    with pytest.raises(ConfigError, match=r"^server_training.batch_size: expected at least 2"):
        FedFTG(server_training=LocalTraining(batch_size=1))


@pytest.mark.parametrize(
    ("table", "key", "complaint"),
    [
        ("generator_training", {"steps": 7}, "expected None, since G trains on the batches of .*, found 7"),
        ("generator_training", {"epochs": 2}, "expected 1, since G trains on the batches of .*, found 2"),
        ("generator_training", {"batch_size": 50}, "expected 16, since G trains on the batches of .*, found 50"),
        ("server_training", {"epochs": 5}, "expected 1, since server_training.steps says how long it is, found 5"),
        ("server_training", {"steps": None}, "expected a number of steps, each with samples of its own, found None"),
    ],
)
def test_lengths_that_nothing_would_read_are_refused(table, key, complaint):
    (name,) = key
    with pytest.raises(ConfigError, match=rf"^{table}\.{name}: {complaint}$"):
        FedFTG(**{table: replace(getattr(FedFTG(), table), **key)})
