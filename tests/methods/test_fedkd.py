"""FedKD: the adaptive losses, and what really crosses the wire."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.needs import Need
from potluck.core.nets.weights import load, parameters_of, weights_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedkd import AdaptiveLosses, FedKD, changed
from potluck.methods.local import Local
from potluck.models.contract import StagedNet
from potluck.parts.lowrank import factored, multiplied
from potluck.parts.means import Aggregate
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
STILL = LocalTraining("sgd", lr=0.0, batch_size=64)
SHORT = LocalTraining("sgd", lr=0.1, epochs=2, batch_size=4)
WHOLE = {"energy_start": 1.0, "energy_end": 1.0}
ALONE = {"distillation": 0.0, "hidden": 0.0}


def sent(run, id=0):
    return run.wire.sent["local_update"][-1][id]


def replied(run, id=0):
    return run.wire.replied["local_update"][-1][id]["update"]


def numbers(packed):
    return {kind: sum(tensor.numel() for tensor in tensors.values()) for kind, tensors in packed.items()}


def payload(packed):
    return sum(tensor.numel() * tensor.element_size() for tensors in packed.values() for tensor in tensors.values())


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The losses


class Says(nn.Module):
    """A net whose logits are its parameters, whatever it is shown."""

    def __init__(self, *rows):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(rows, dtype=torch.float64))

    def forward(self, inputs):
        return self.logits


def talking(own, common):
    return nn.ModuleDict({"own": Says(*own), "common": Says(*common)})


def batch(*labels):
    return Batch(torch.zeros(len(labels), 1), torch.tensor(labels), {})


def test_the_loss_of_a_case_done_by_hand():
    own, common = [[log(0.75), log(0.25)]], [[log(0.5), log(0.5)]]
    tasks = -log(0.75), -log(0.5)
    from_mentee = 0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25)
    from_mentor = 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)
    by_hand = sum(tasks) + 2.0 * (from_mentee + from_mentor) / sum(tasks)
    loss = AdaptiveLosses(F.cross_entropy, 2.0, 0.0, joint=False)(talking(own, common), batch(0), {})
    assert_close(loss.item(), by_hand, rtol=1e-12, atol=0)


@pytest.mark.parametrize("joint", [False, True])
def test_each_net_follows_the_slope_of_its_own_loss_or_of_both(joint):
    net = talking([[0.3, -1.0, 0.5], [2.0, 0.1, -0.4]], [[-0.2, 0.8, 0.1], [0.5, 0.4, 1.5]])
    labels = torch.tensor([2, 0])
    AdaptiveLosses(F.cross_entropy, 0.7, 0.0, joint)(net, batch(2, 0), {}).backward()

    def kl(taught, logits):
        p = taught.softmax(1)
        return (p * (p.log() - logits.log_softmax(1))).sum(1).mean()

    def one(mine, other):  # L_t of the mentor's logits, or L_s of the mentee's
        task, quality = F.cross_entropy(mine, labels), F.cross_entropy(mine, labels) + F.cross_entropy(other, labels)
        return task + 0.7 * kl(other, mine) / quality

    for learner, peer in (("own", "common"), ("common", "own")):
        at, fixed, step = net[learner].logits.detach(), net[peer].logits.detach(), 1e-6

        def loss(logits, fixed=fixed):
            return one(logits, fixed) + (one(fixed, logits) if joint else 0)

        for place in range(6):
            nudge = torch.zeros(6, dtype=torch.float64).index_fill(0, torch.tensor(place), step).view(2, 3)
            slope = (loss(at + nudge) - loss(at - nudge)) / (2 * step)
            assert_close(net[learner].logits.grad.view(-1)[place], slope, rtol=1e-7, atol=1e-9)


def linked(widths=(4, 3)):
    """A mentor and a mentee of different widths, and the layer from the mentee's features to the mentor's."""
    nets = [StagedNet({"a": nn.Linear(6, d), "b": nn.Tanh()}, nn.Linear(d, 3)) for d in widths]
    net = nn.ModuleDict({"own": nets[0], "common": nets[1], "link": nn.Linear(widths[1], widths[0], bias=False)})
    for number, parameter in enumerate(net.double().parameters()):
        parameter.data = random(*parameter.shape, seed=number)
    return net


def test_hidden_features_draw_each_net_and_the_layer_between_by_the_quality_of_both():
    net, inputs, labels = linked(), random(5, 6), torch.tensor([0, 1, 2, 0, 1])
    AdaptiveLosses(F.cross_entropy, 0.0, 0.3, joint=False)(net, Batch(inputs, labels, {}), {}).backward()
    found = {name: parameter.grad for name, parameter in net.named_parameters()}
    h_t, h_s = (torch.tanh(net[name].stages.a(inputs)) for name in ("own", "common"))
    task_t, task_s = (F.cross_entropy(net[n].head(h), labels) for n, h in (("own", h_t), ("common", h_s)))
    mapped = h_s @ net["link"].weight.T

    def loss(h_t, mapped, task, other):
        return task + 0.3 * (h_t - mapped).square().mean() / (task + other)

    mentor = loss(h_t, h_s.detach() @ net["link"].weight.T, task_t, task_s.detach())
    mentee = loss(h_t.detach(), mapped, task_s, task_t.detach())
    expected = torch.autograd.grad(mentor + mentee, list(net.parameters()))
    for (name, gradient), wanted in zip(found.items(), expected, strict=True):
        assert_close(gradient, wanted, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_certain_predictions_do_not_divide_by_zero():
    net = talking([[60.0, -60.0]], [[50.0, -50.0]])
    net.float()
    loss = AdaptiveLosses(F.cross_entropy, 1.0, 0.0, joint=False)(net, batch(0), {})
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


# What becomes of an update


def test_a_change_is_added_and_what_a_client_has_left_out_stays():
    common = {"w": random(20, 30), "b": random(4), "count": torch.tensor(3)}
    update = {"w": random(20, 1, seed=1) @ random(1, 30, seed=2), "count": torch.tensor(2)}
    after = changed(common, factored(update, 0.999))
    assert_close(after["w"], common["w"] + update["w"])
    assert_close(after["b"], common["b"], **EXACTLY)
    assert after["count"] == 5
    assert after["count"].dtype == torch.int64


@pytest.mark.parametrize(("round", "energy"), [(1, 0.82), (5, 0.9), (10, 1.0), (25, 1.0)])
def test_the_energy_grows_to_its_end_and_stays(round, energy):
    method = FedKD(energy_start=0.8, energy_end=1.0, growth=10)
    assert method.energy(round) == pytest.approx(energy)


# What crosses the wire


def test_bytes_are_those_of_what_is_sent(play, clouds):
    run = play(FedKD(SHORT, energy_start=0.5, energy_end=0.5), clouds("wide2", "mlp3"), rounds=0)
    whole = sum(tensor.numel() * tensor.element_size() for tensor in run.state.common.values())
    for _ in range(2):
        run.round()
        traffic = run.reports[-1].traffic
        assert traffic.up == {"update": payload(replied(run, 0)) + payload(replied(run, 1))}
        assert 0 < traffic.up["update"] < 0.6 * 2 * whole
        assert numbers(replied(run))["left"]
    assert run.reports[0].traffic.down == {"common": 2 * whole, "version": 2 * 8}
    assert run.reports[1].traffic.down == {"update": 2 * payload(run.states[1].update), "version": 2 * 8}


def test_a_higher_energy_sends_more_and_loses_less(play, clouds):
    found = []
    for energy in (0.3, 0.9, 0.99, 1.0):
        run = play(FedKD(SHORT, energy_start=energy, energy_end=energy), clouds("wide2"))
        exact = play(FedKD(SHORT, **WHOLE), clouds("wide2"))
        gaps = [(run.state.common[name] - tensor).square().sum() for name, tensor in exact.state.common.items()]
        found.append((run.reports[0].traffic.up["update"], -float(sum(gaps))))
    assert found == sorted(found)
    assert found[0][0] < found[-1][0]
    assert found[0][1] < -1e-6
    assert found[-1][1] == 0.0


def test_uncompressed_it_sends_the_whole_mentee_and_averages_plainly(play, clouds):
    federation = clouds("norm2", "norm2", "norm2")
    ours = play(FedKD(SHORT, **WHOLE, **ALONE), federation, rounds=3)
    fedavg = play(FedAvg(SHORT, Sharing(weighting="uniform")), federation, rounds=0)
    fedavg.states = [replace(fedavg.state, weights={"all": ours.states[0].common})]
    for _ in range(3):
        fedavg.round()
    for mine, theirs in zip(ours.states, fedavg.states, strict=True):
        assert_close(mine.common, theirs.weights["all"], rtol=1e-4, atol=1e-6)
    assert numbers(replied(ours))["left"] == 0
    assert ours.reports[0].traffic.up["update"] == ours.reports[0].traffic.down["common"]


def test_the_server_adds_the_compressed_mean_of_what_clients_sent(play, clouds):
    run = play(FedKD(SHORT, energy_start=0.5, energy_end=0.5), clouds("wide2", "mlp2", "norm2"))
    before = run.states[0].common
    updates = [multiplied(replied(run, id), before) for id in range(3)]
    mean = {name: torch.stack([update[name] for update in updates]).mean(0) for name in before}
    update = factored(mean, 0.5)
    assert numbers(update) == numbers(run.state.update)
    for name, tensor in before.items():
        assert_close(run.state.common[name], tensor + multiplied(update, before)[name], rtol=1e-4, atol=1e-6)


def test_a_robust_rule_applies_to_the_updates(play, clouds):
    run = play(FedKD(SHORT, combine=Aggregate("median"), **WHOLE), clouds("mlp2", "mlp3", "wide2"))
    updates = torch.stack([replied(run, id)["whole"]["head.weight"] for id in range(3)])
    assert_close(run.state.update["whole"]["head.weight"], updates.median(0).values)


# Who holds what


def mentees(run, ids):
    """The mentee from which each client trained in the last round."""
    return [run.kept(id)["state"]["common"] for id in ids]


def test_every_client_trains_from_the_servers_mentee_whenever_it_takes_part(play, clouds):
    run = play(FedKD(SHORT), clouds("norm2", "mlp2", "mlp3"), rounds=0)
    for cohort, whole in [((0, 1), {0, 1}), ((0, 1), set()), ((1, 2), {2}), ((0, 2), {0}), ((0, 1, 2), {1})]:
        run.round(*cohort)
        assert {id for id in cohort if "common" in sent(run, id)} == whole
        for mentee in mentees(run, cohort):
            assert_close(mentee, run.states[-2].common, **EXACTLY)


def test_a_client_that_holds_another_version_sits_out_and_is_sent_the_whole_mentee_next(play, clouds):
    run = play(FedKD(SHORT), clouds("mlp2", "mlp3"))
    before = [weights_of(run.model(id)) for id in range(2)]
    run.states.append(replace(run.state, version=7))
    run.round()
    assert numbers(replied(run)) == {"whole": 0, "left": 0, "right": 0}
    assert_close([weights_of(run.model(id)) for id in range(2)], before, **EXACTLY)
    assert_close(run.state.common, run.states[1].common, **EXACTLY)
    run.round()
    assert_close(sent(run)["common"], run.states[1].common, **EXACTLY)
    assert not torch.equal(run.state.common["head.weight"], run.states[1].common["head.weight"])


def test_a_client_whose_last_round_was_lost_does_not_add_an_update_twice(play, clouds):
    run = play(FedKD(SHORT), clouds("mlp2", "mlp3"))
    after_one = run.state
    run.round()
    lost = run.engine.round(3, after_one, (0, 1))[0]  # clients have gone on; the server is where it was
    for mentee in mentees(run, (0, 1)):
        assert_close(mentee, after_one.common, **EXACTLY)
    assert lost.version == 2
    assert not torch.equal(lost.common["head.weight"], after_one.common["head.weight"])  # they have trained


# A round, and what it becomes


def test_a_clients_step_is_the_papers(play, clouds):
    federation = clouds("mlp2", "wide2")
    run = play(FedKD(FULL, distillation=0.7, hidden=0.3, **WHOLE), federation, rounds=1)
    mentor, mentee = run.model(1).train(), load(run.engine.global_model(run.state), run.state.common).train()
    link = nn.Linear(8, 16, bias=False)
    link.weight.data = run.kept(1)["modules"]["link"]["weight"]
    net, data = nn.ModuleDict({"own": mentor, "common": mentee, "link": link}), federation.sites[1].train
    loss = AdaptiveLosses(F.cross_entropy, 0.7, 0.3, joint=False)(net, Batch(data.inputs, data.labels, {}), {})
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient
    run.round(1)
    assert_close(weights_of(run.model(1)), weights_of(mentor))
    assert_close(run.state.common, weights_of(mentee))
    assert_close(run.kept(1)["modules"]["link"]["weight"], link.weight.detach())


def test_without_teaching_mentors_train_alone_and_with_it_they_do_not(play, clouds):
    federation = clouds("norm2", "wide2")
    local = play(Local(SHORT), federation, rounds=2)
    for changes, same in ((ALONE, True), ({"hidden": 0.0}, False), ({"distillation": 0.0}, False)):
        run = play(FedKD(SHORT, **changes), federation, rounds=2)
        for id in range(2):
            mine, theirs = (parameters_of(each.model(id))["head.weight"] for each in (run, local))
            assert torch.equal(mine, theirs) == same


def test_clients_are_judged_with_their_mentors_and_the_server_with_the_mentee(play, clouds):
    run = play(FedKD(SHORT), clouds("mlp2", "mlp3"))
    for id in range(2):
        assert_close(weights_of(run.model(id)), run.kept(id)["model"], **EXACTLY)
    assert_close(weights_of(run.engine.global_model(run.state)), run.state.common, **EXACTLY)


def test_nets_split_only_where_features_are_compared():
    assert FedKD().needs() == {Need.CLASSES, Need.SPLIT_MODEL}
    assert FedKD(hidden=0.0).needs() == {Need.CLASSES}


@pytest.mark.parametrize(
    "changes",
    [
        {"distillation": -1.0},
        {"hidden": -1.0},
        {"energy_start": 1.1},
        {"energy_end": -0.1},
        {"growth": 0},
        {"gradients": "both"},
    ],
)
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FedKD(), **changes)
