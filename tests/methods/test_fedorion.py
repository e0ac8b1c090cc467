from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message
from potluck.core.needs import Need
from potluck.core.nets.batchnorm import batch_norms, keep_statistics
from potluck.core.nets.weights import buffers_of, load, weights_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedorion import FedORION, teacher
from potluck.models.contract import StagedNet
from potluck.parts.noise import noise_examples
from potluck.parts.sharing import Sharing
from potluck.parts.teaching import EnsembleLoss, MutualLoss, probabilities

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
STILL = LocalTraining("sgd", lr=0.0, batch_size=4)
SHORT = LocalTraining("sgd", lr=0.01, epochs=2, batch_size=4)
NOISY = LocalTraining("sgd", lr=0.05, epochs=1, batch_size=16)
ORION = FedORION(SHORT, NOISY, noise_batches=4)
BOTH_ORDERS = pytest.mark.parametrize("order", ["sequential", "simultaneous"])


def small():
    """The global architecture of federations in which nobody holds it."""
    return StagedNet({"stem": nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())}, nn.Linear(5, 3))


@pytest.fixture
def strangers(clouds):
    """A federation in which no client's own model has the global architecture."""

    def make(*architectures, **options):
        federation = clouds(*architectures, **options)
        return replace(
            federation, architectures={**federation.architectures, "small": small}, server_architecture="small"
        )

    return make


@pytest.fixture
def isolated_draws():
    """Nets of this test may be drawn from torch's global generator."""
    state = torch.default_generator.get_state()
    torch.manual_seed(0)
    yield
    torch.default_generator.set_state(state)


def uniform(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nets(run, client=0):
    """A client's own model before the first round, and its copy of the global one."""
    return run.new_model(client).train(), run.engine.global_model(run.states[0]).train()


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


def told(net, inputs):
    """A net's probabilities as a teacher gives them: by batch statistics, which are not remembered."""
    with torch.no_grad(), keep_statistics(net):
        return F.softmax(net(inputs), 1)


def entropy_to(probabilities, logits):
    return -(probabilities * F.log_softmax(logits, 1)).sum(1).mean()


def differs(a, b):
    return any(not torch.equal(tensor, b[name]) for name, tensor in a.items())


# Mutual learning (eq. 1, 2)


def pair():
    return nn.ModuleDict({"own": nn.Linear(6, 3), "common": nn.Linear(6, 3)})


@pytest.mark.usefixtures("isolated_draws")
def test_a_loss_is_that_of_the_labels_and_the_cross_entropy_to_the_peer():
    net, (x, y) = pair(), (uniform(7, 6), torch.tensor([0, 1, 2, 0, 1, 2, 0]))
    own, peer = net["own"](x), net["common"](x)
    expected = F.cross_entropy(own, y) + entropy_to(F.softmax(peer, 1), own)
    assert_close(MutualLoss("own", "common", F.cross_entropy)(net, Batch(x, y, {}), {}), expected)


@pytest.mark.usefixtures("isolated_draws")
@pytest.mark.parametrize(("learner", "peer"), [("own", "common"), ("common", "own")])
def test_a_loss_has_no_gradient_in_the_peer(learner, peer):
    net = pair()
    loss = MutualLoss(learner, peer, F.cross_entropy)(
        net, Batch(uniform(7, 6), torch.zeros(7, dtype=torch.int64), {}), {}
    )
    gradients = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    untouched = {name for (name, _), g in zip(net.named_parameters(), gradients, strict=True) if g is None}
    assert untouched == {f"{peer}.weight", f"{peer}.bias"}


@pytest.mark.usefixtures("isolated_draws")
def test_without_labels_a_net_that_agrees_with_its_peer_is_at_rest():
    net = pair()
    net["own"].load_state_dict(net["common"].state_dict())
    loss = MutualLoss("own", "common", None)(net, Batch(uniform(7, 6), torch.zeros(7, dtype=torch.int64), {}), {})
    for gradient in torch.autograd.grad(loss, list(net["own"].parameters())):
        assert gradient.abs().amax() < 1e-6
    told = F.softmax(net["common"](uniform(7, 6)), 1)
    assert_close(loss, -(told * told.log()).sum(1).mean())


@BOTH_ORDERS
@pytest.mark.parametrize("mutual", [True, False])
def test_a_client_step_is_the_papers(play, strangers, order, mutual):
    federation = strangers("norm2", "mlp3")
    for id in (0, 1):
        method = FedORION(FULL, order=order, selective=mutual, mutual=mutual, distillation=False)
        run = play(method, federation, rounds=0)
        own, common = nets(run, id)
        x, y = federation.sites[id].train.inputs, federation.sites[id].train.targets
        before = told(own, x)
        logits = own(x)
        full_step(own, F.cross_entropy(logits, y) + entropy_to(told(common, x), logits))
        peer = told(own, x) if order == "sequential" else before
        logits = common(x)
        full_step(common, entropy_to(peer, logits) + (F.cross_entropy(logits, y) if mutual else 0))
        run.round(id)
        assert_close(run.state.common, weights_of(common))
        assert_close(run.kept(id)["model"], weights_of(own))


def test_the_two_orders_differ(play, strangers):
    runs = [play(replace(ORION, order=order), strangers("norm2")) for order in ("sequential", "simultaneous")]
    assert differs(runs[0].state.common, runs[1].state.common)


@BOTH_ORDERS
def test_running_statistics_move_once_a_batch(play, strangers, order):
    method = FedORION(replace(SHORT, epochs=1), order=order, distillation=False)
    run = play(method, strangers("norm2", sizes=(12,)))
    for weights in (run.kept(0)["model"], run.state.common):
        counts = [int(tensor) for name, tensor in weights.items() if name.endswith("num_batches_tracked")]
        assert counts == [3] * len(counts)
        assert counts


@BOTH_ORDERS
def test_a_last_batch_of_one_example_is_dropped(play, strangers, order):
    method = FedORION(replace(SHORT, epochs=1), order=order, distillation=False)
    run = play(method, strangers("norm2", sizes=(9,)))
    assert run.state.common["stages.stem.1.num_batches_tracked"] == 2


def test_without_labels_for_the_copy_the_own_model_still_learns_them(play, strangers):
    federation = strangers("mlp2")
    x, y = federation.sites[0].train.inputs, federation.sites[0].train.targets
    method = FedORION(replace(FULL, epochs=200), distillation=False, selective=False, mutual=False)
    run = play(method, federation, rounds=0)
    before = F.cross_entropy(run.model(0)(x), y)
    run.round()
    assert F.cross_entropy(run.model(0)(x), y) < 0.8 * before


def test_a_client_goes_on_from_its_own_model_and_from_the_servers_copy(play, strangers):
    run = play(FedORION(STILL, NOISY, noise_batches=4), strangers("norm2", "mlp3"), rounds=2)
    for round, (sent, replied) in enumerate(
        zip(run.wire.sent["local_update"], run.wire.replied["local_update"], strict=True)
    ):
        assert_close(sent[0]["common"], run.states[round].common, **EXACTLY)
        assert_close(parameters_in(replied[0]["common"]), parameters_in(sent[0]["common"]), **EXACTLY)
    own = [replied[0]["own"] for replied in run.wire.replied["local_update"]]
    assert_close(parameters_in(own[0]), parameters_in(own[1]), **EXACTLY)
    assert differs(parameters_in(run.states[1].common), parameters_in(run.states[0].common))


def parameters_in(weights):
    return {name: tensor for name, tensor in weights.items() if "running" not in name and "num_batches" not in name}


def test_the_server_does_not_change_a_clients_own_model(play, strangers):
    run = play(ORION, strangers("norm2", "mlp3"))
    for id in (0, 1):
        sent_back = run.wire.replied["local_update"][0][id]["own"]
        assert_close(run.kept(id)["model"], sent_back, **EXACTLY)
        assert_close(weights_of(run.model(id)), sent_back, **EXACTLY)
    run.round(0)
    assert_close(weights_of(run.model(1)), sent_back, **EXACTLY)
    assert differs(weights_of(run.model(0)), run.wire.replied["local_update"][0][0]["own"])


# Who learns mutually


def test_by_algorithm_1_a_client_of_the_global_architecture_learns_mutually_too(play, clouds):
    run = play(replace(ORION, selective=False), clouds("norm2", "norm3", "norm2"), rounds=2)
    for replied in run.wire.replied["local_update"]:
        assert [set(reply) for reply in replied.values()] == [{"own", "common", "examples"}] * 3
    for id in range(3):
        assert_close(weights_of(run.model(id)), run.kept(id)["model"], **EXACTLY)
    assert differs(run.kept(0)["model"], run.state.common)
    assert not run.engine.evaluation_traffic.down  # each is judged with the model that it keeps


def test_by_algorithm_1_the_two_nets_of_one_architecture_are_no_copies(play, clouds):
    run = play(replace(ORION, selective=False, order="simultaneous"), clouds("norm2", "norm3"), rounds=0)
    own, common = nets(run)
    assert all(not torch.equal(a, b) for a, b in zip(own.parameters(), common.parameters(), strict=True) if a.dim() > 1)
    run.round()
    reply = run.wire.replied["local_update"][0][0]
    assert differs(reply["own"], reply["common"])


@pytest.mark.parametrize("mutual", [True, False])
def test_without_mutual_learning_no_copy_sees_a_label(play, clouds, mutual):
    # One step from what both nets predicted before it, so that a client's own model has no labels to hand on yet.
    method = FedORION(FULL, order="simultaneous", selective=False, mutual=mutual, distillation=False)
    federation = clouds("norm2", "norm3")  # the first holds the global architecture
    sites = {}
    for id, site in federation.sites.items():
        sites[id] = replace(site, train=replace(site.train, targets=(site.train.targets + 1) % 3))
    first, other = play(method, federation), play(method, replace(federation, sites=sites))
    assert differs(first.kept(0)["model"], other.kept(0)["model"])
    copies = (run.wire.replied["local_update"][0] for run in (first, other))
    seen = [
        differs(one["common"], two["common"]) for one, two in zip(*(found.values() for found in copies), strict=True)
    ]
    assert seen == [mutual, mutual]


def test_clients_that_hold_the_global_architecture_do_not_learn_mutually(play, clouds):
    run = play(ORION, clouds("norm2", "norm3", "norm2"))
    replied = run.wire.replied["local_update"][0]
    assert ["own" in reply for reply in replied.values()] == [False, True, False]


def test_clients_below_the_budget_train_the_global_architecture(play, clouds):
    federation = clouds("norm2", "norm3", "norm3", capacities=(1.0, 0.5, 0.6))
    run = play(replace(ORION, mutual_from=0.6), federation)
    assert ["own" in reply for reply in run.wire.replied["local_update"][0].values()] == [False, False, True]
    assert_close(weights_of(run.model(1)), run.state.common, **EXACTLY)
    assert run.model(2).state_dict().keys() > run.state.common.keys()


def test_clients_that_hold_the_global_model_only_keep_no_net(play, clouds):
    federation = clouds("norm2", "norm3", "norm3", capacities=(1.0, 0.5, 0.6))
    run = play(replace(ORION, mutual_from=0.6), federation, rounds=2)
    assert [run.engine.store.read(client) is None for client in range(3)] == [True, True, False]


def test_a_client_without_mutual_learning_trains_on_labels_alone(play, clouds):
    federation = clouds("norm2")
    run = play(FedORION(FULL, distillation=False), federation, rounds=0)
    net = run.engine.global_model(run.state).train()
    full_step(net, F.cross_entropy(net(federation.sites[0].train.inputs), federation.sites[0].train.targets))
    run.round()
    assert_close(run.state.common, weights_of(net))


def test_who_is_judged_with_which_model(play, clouds):
    run = play(ORION, clouds("norm2", "norm3"), rounds=2)
    assert_close(weights_of(run.model(0)), run.state.common, **EXACTLY)
    assert_close(weights_of(run.model(1)), run.kept(1)["model"], **EXACTLY)
    assert_close(weights_of(run.engine.global_model(run.state)), run.state.common, **EXACTLY)
    common = sum(tensor.numel() * tensor.element_size() for tensor in run.state.common.values())
    assert run.engine.evaluation_traffic.down == {"common": common}


# Aggregation


@pytest.mark.parametrize("sizes", [(12, 20, 9), (40, 8, 9)])
def test_without_distillation_the_global_model_is_the_plain_mean_of_copies(play, clouds, sizes):
    run = play(replace(ORION, distillation=False), clouds("norm2", "norm3", "norm2", sizes=sizes))
    copies = [reply["common"] for reply in run.wire.replied["local_update"][0].values()]
    for name, tensor in run.state.common.items():
        stacked = torch.stack([copy[name] for copy in copies])
        assert_close(tensor, stacked.mean(0) if tensor.is_floating_point() else stacked.amax(0))


def test_with_one_architecture_and_no_distillation_it_is_fedavg_bit_for_bit(play, clouds):
    federation = clouds("norm2", "norm2", "norm2")
    ours = play(FedORION(SHORT, distillation=False), federation, rounds=3)
    theirs = play(FedAvg(SHORT, Sharing(weighting="uniform")), federation, rounds=3)
    assert_close([s.common for s in ours.states], [s.weights["all"] for s in theirs.states], **EXACTLY)
    assert [r.losses for r in ours.reports] == [r.losses for r in theirs.reports]


def test_without_aggregation_copies_are_neither_sent_nor_used(play, strangers):
    federation = strangers("norm2", "mlp3")
    run = play(replace(ORION, aggregation=False, server_training=replace(NOISY, lr=0.0)), federation, rounds=2)
    assert set(run.reports[0].traffic.up) == {"own", "examples"}
    assert_close(parameters_in(run.state.common), parameters_in(run.states[0].common), **EXACTLY)
    moved = play(replace(ORION, aggregation=False), federation)
    assert differs(parameters_in(moved.state.common), parameters_in(run.states[0].common))


def test_without_aggregation_running_statistics_are_those_of_the_noise(play, strangers):
    federation = strangers("norm2", "mlp3")
    run = play(replace(ORION, aggregation=False), federation)
    assert run.state.common["stages.stem.1.num_batches_tracked"] == 4
    assert differs(run.state.common, {**run.state.common, **buffers_of(small())})


# Distillation (eq. 3)


def noise_loss(student, teachers, examples, noise, keep=True):
    batch = Batch(noise, torch.empty(len(noise), 0), {})
    return EnsembleLoss(keep)(student, batch, {"teachers": teachers, "shares": examples})


def normed():
    """A net whose running statistics are far from those of noise."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    for _ in range(50):
        net(3 + 2 * torch.randn(16, 6))
    return net


def ready(net, run):
    """The net as the server makes a teacher of it."""
    server = run.engine.server(1)
    server.build = lambda architecture=None: net
    return teacher(server, 0, Message(own=weights_of(net), examples=1))


@pytest.fixture
def teachers(play, clouds, isolated_draws):
    run = play(ORION, clouds("mlp2"), rounds=0)
    return [ready(normed(), run) for _ in range(2)]


def test_the_loss_is_the_weighted_sum_of_the_teachers_losses(teachers):
    student, noise = nn.Linear(6, 3), uniform(20, 6)
    one, two = (noise_loss(student, [each], [5], noise) for each in teachers)
    expected = (5 * entropy_to(told(teachers[0], noise), student(noise))) / 5
    assert_close(one, expected)
    assert_close(noise_loss(student, teachers, [30, 10], noise), (30 * one + 10 * two) / 40)
    assert not torch.isclose(one, two, rtol=1e-3)


def test_the_order_of_teachers_does_not_matter(teachers):
    student, noise = nn.Linear(6, 3), uniform(20, 6)
    there = noise_loss(student, teachers, [30, 10], noise)
    assert_close(noise_loss(student, teachers[::-1], [10, 30], noise), there)


def test_a_student_that_equals_its_only_teacher_is_at_rest(teachers):
    student, noise = nn.Sequential(*[layer for layer in normed() if not isinstance(layer, nn.Dropout)]), uniform(20, 6)
    weights = {name.replace("4.", "3."): tensor for name, tensor in weights_of(teachers[0]).items()}
    loss = noise_loss(load(student, weights, partial=True), [teachers[0]], [7], noise)
    probs = told(teachers[0], noise)
    assert_close(loss, -(probs * probs.log()).sum(1).mean())
    for gradient in torch.autograd.grad(loss, list(student.parameters())):
        assert gradient.abs().amax() < 1e-6


def test_teachers_normalise_by_the_batch_and_nothing_in_them_changes(teachers):
    student, (net, _) = nn.Linear(6, 3), teachers
    before = weights_of(net)
    noise_loss(student, teachers, [1, 1], uniform(20, 6)).backward()
    assert_close(weights_of(net), before, **EXACTLY)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not probabilities(net, uniform(20, 6)).requires_grad  # no graph of each teacher is kept
    assert_close(probabilities(net, uniform(20, 6)), probabilities(net, uniform(20, 6)), **EXACTLY)  # no Dropout
    layer = batch_norms(net)["1"]
    h = net[0](uniform(20, 6))
    plain = (h - h.mean(0)) / (h.var(0, correction=0) + layer.eps).sqrt() * layer.weight + layer.bias
    assert_close(probabilities(net, uniform(20, 6)), F.softmax(net[4](F.relu(plain)), 1))


@pytest.mark.usefixtures("isolated_draws")
def test_teachers_would_agree_on_one_class_by_their_running_statistics(play, clouds):
    run = play(ORION, clouds("mlp2"), rounds=0)
    spread, collapsed = [], []
    for net in (normed(), normed()):
        noise = uniform(500, 6)
        with torch.no_grad():
            collapsed.append(net.eval()(noise).argmax(1).bincount(minlength=3).max())
        teacher = ready(net.train(), run)
        spread.append(probabilities(teacher, noise).argmax(1).bincount(minlength=3).max())
    assert sum(collapsed) > sum(spread)


@pytest.mark.parametrize("keep", [True, False])
def test_the_students_running_statistics_are_kept_from_the_noise(teachers, keep):
    student = normed()
    before = buffers_of(student)
    noise_loss(student, teachers, [1, 1], uniform(20, 6), keep=keep).backward()
    assert differs(buffers_of(student), before) == (not keep)
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_a_server_step_is_the_papers(play, clouds, monkeypatch):
    noise = uniform(16, 6)
    fixed = replace(noise_examples("gaussian", 16, (6,)), inputs=noise, preprocess=None)
    monkeypatch.setattr("potluck.parts.noise.noise_examples", lambda kind, count, shape: fixed)
    federation = clouds("norm2", "norm3", "mlp3")  # the first holds the global architecture
    run = play(FedORION(SHORT, replace(FULL, epochs=3)), federation)
    averaged = play(FedORION(SHORT, distillation=False), federation).state.common
    replied = run.wire.replied["local_update"][0]
    nets = {id: federation.architectures[site.architecture]().train() for id, site in federation.sites.items()}
    for id, net in nets.items():
        load(net, replied[id].get("own") or replied[id]["common"])
    student = load(federation.architectures["norm2"](), averaged).train()
    for _ in range(3):
        with keep_statistics(student):
            logits = student(noise)
        full_step(student, sum(n * entropy_to(told(nets[i], noise), logits) for i, n in enumerate((12, 20, 9))) / 41)
    assert_close(run.state.common, weights_of(student))
    assert_close(buffers_of(student), {name: averaged[name] for name in buffers_of(student)}, **EXACTLY)


def test_distillation_brings_the_global_model_nearer_to_its_teachers(play, strangers):
    federation = strangers("norm2", "norm3", "mlp3", labels=((0, 1), (1, 2), (0, 2)))
    method = FedORION(replace(SHORT, epochs=10), replace(NOISY, batch_size=64, lr=0.3), noise_batches=60)
    run = play(method, federation)
    averaged = play(replace(method, distillation=False), federation).state.common
    replied = run.wire.replied["local_update"][0]
    teachers = [teacher(run.engine.server(1), id, reply) for id, reply in replied.items()]
    noise, examples = uniform(500, 6), torch.tensor([12, 20, 9])
    taught = (torch.stack([told(net, noise) for net in teachers]) * examples[:, None, None]).sum(0) / 41
    before, after = (
        noise_loss(load(small(), weights).train(), teachers, [12, 20, 9], noise) - entropy_to(taught, taught.log())
        for weights in (averaged, run.state.common)
    )  # KL(mean of the teachers || student)
    assert 0 < after < 0.5 * before


@pytest.mark.parametrize(("noise_batches", "steps"), [(3, 6), (None, 8)])
def test_an_epoch_has_as_much_noise_as_the_federation_has_data(play, strangers, noise_batches, steps):
    # Without aggregation BatchNorm counts the batches. Two epochs; 12 + 20 + 9 + 16 examples fill four batches of 16.
    federation = strangers("norm2", "mlp3", "norm3", "mlp2")
    method = FedORION(SHORT, replace(NOISY, epochs=2), aggregation=False, noise_batches=noise_batches)
    run = play(method, federation, rounds=0)
    run.round(0, 1)  # whoever is drawn
    assert run.state.common["stages.stem.1.num_batches_tracked"] == steps


def test_every_round_distils_on_other_noise(play, strangers):
    resting = FedORION(STILL, replace(NOISY, epochs=1), noise_batches=1, aggregation=False)
    run = play(resting, strangers("norm2"), rounds=0)
    other = play(resting, strangers("norm2"), rounds=0)
    first, _ = run.engine.round(1, run.state, [0])
    second, _ = other.engine.round(2, other.state, [0])
    assert differs(first.common, second.common)


@pytest.mark.parametrize("kind", ["dead_leaves", "stylegan"])
def test_image_noise_distils_images_and_refuses_other_inputs_at_the_start(play, clouds, kind):
    federation = clouds("mlp2", "mlp3")
    with pytest.raises(ConfigError, match=rf"noise '{kind}' makes images; .* found \(6,\)"):
        play(replace(ORION, noise=kind), federation, rounds=0)
    play(replace(ORION, noise=kind, distillation=False), federation)
    run = play(replace(ORION, noise=kind), pictures(federation))
    assert differs(run.state.common, play(ORION, pictures(federation)).state.common)
    assert all(tensor.isfinite().all() for tensor in run.state.common.values())


def pictures(federation):
    """The same points as images of one channel, two rows and three columns."""
    sites = {}
    for id, site in federation.sites.items():
        data = replace(site.train, inputs=site.train.inputs.view(-1, 1, 2, 3))
        sites[id] = replace(site, train=data, validation=data, test=data)
    return replace(federation, sites=sites)


# Algorithm 1 whole, from the paper alone


@pytest.mark.usefixtures("uncounted")
def test_three_rounds_are_algorithm_1(in_double_precision, play, clouds, monkeypatch):
    federation = clouds("norm2", "norm3", "norm2")  # the first and the last hold the global architecture
    noise = overheard(monkeypatch)
    method = FedORION(SHORT_OF_ONE_BATCH, NOISE_OF_ONE_BATCH, selective=False, noise_batches=1)
    run = play(method, federation, rounds=0)
    thetas = {id: run.new_model(id).train() for id in federation.sites}
    theta_g = run.engine.global_model(run.state).train()
    for cohort in ([0, 1, 2], [0, 1], [1, 2]):
        noise.clear()
        run.round(*cohort)
        data = {id: (federation.sites[id].train.inputs, federation.sites[id].train.targets) for id in cohort}
        copies = [deepcopy(theta_g) for _ in cohort]
        for id, theta_gi in zip(cohort, copies, strict=True):
            mutually(thetas[id], theta_gi, *data[id], epochs=3)
        theta_g = mean_of(copies)
        assert len(noise) == 2
        distil(theta_g, [thetas[id] for id in cohort], [len(data[id][0]) for id in cohort], noise)
        assert_close(numbers_in(run.state.common), numbers_in(theta_g.state_dict()), rtol=0, atol=1e-14)
        for id in cohort:
            kept, theta = run.kept(id)["model"], thetas[id].state_dict()
            assert_close(numbers_in(kept), numbers_in(theta), rtol=0, atol=1e-14)


# The order of examples does not matter where an epoch has one batch.
SHORT_OF_ONE_BATCH = LocalTraining("sgd", lr=0.05, epochs=3, batch_size=64, momentum=0.9)
NOISE_OF_ONE_BATCH = LocalTraining("sgd", lr=0.02, epochs=2, batch_size=16, momentum=0.9)


def mutually(theta_i, theta_gi, x, y, epochs):
    """Algorithm 1, in client."""
    steps_i, steps_gi = (torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (theta_i, theta_gi))
    for _ in range(epochs):
        logits, peer = theta_i(x), foretold(theta_gi, x)
        step(steps_i, cross_entropy(logits, F.one_hot(y, 3)) + cross_entropy(logits, peer))  # eq. 1
        logits, peer = theta_gi(x), foretold(theta_i, x)
        step(steps_gi, cross_entropy(logits, F.one_hot(y, 3)) + cross_entropy(logits, peer))  # eq. 2


def mean_of(copies):
    """Algorithm 1, in server: aggregation, by 1 / C each."""
    mean = deepcopy(copies[0])
    for name, tensor in mean.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(sum(net.state_dict()[name] for net in copies) / len(copies))
    return mean


def distil(theta_g, thetas, n, noise):
    """Algorithm 1, in server: eq. 3 on each batch of noise, by its own statistics, which theta_g does not remember."""
    steps, buffers = torch.optim.SGD(theta_g.parameters(), 0.02, momentum=0.9), buffers_of(theta_g)
    for z in noise:
        logits = theta_g(z)
        step(steps, sum(n_i / sum(n) * cross_entropy(logits, foretold(t, z)) for n_i, t in zip(n, thetas, strict=True)))
    theta_g.load_state_dict(buffers, strict=False)


def cross_entropy(logits, target):
    return -(target * logits.log_softmax(1)).sum(1).mean()


def foretold(net, inputs):
    with torch.no_grad():
        return deepcopy(net)(inputs).softmax(1)  # a copy, so that the net itself remembers no statistics of it


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def numbers_in(weights):
    return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}


def overheard(monkeypatch):
    """The batches of noise as they are drawn."""
    drawn = []

    def listening(kind, count, shape):
        silent = noise_examples(kind, count, shape)

        def draw(inputs, rng):
            drawn.append(silent.preprocess(inputs, rng))
            return drawn[-1].clone()

        return replace(silent, preprocess=draw)

    monkeypatch.setattr("potluck.parts.noise.noise_examples", listening)
    return drawn


# Wire, failures and hyper-parameters


def size_of(weights):
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


@pytest.mark.parametrize("distillation", [True, False])
def test_messages_carry_both_models_and_one_where_there_is_but_one(play, clouds, distillation):
    run = play(replace(ORION, distillation=distillation), clouds("norm2", "norm3", "mlp3"))
    common = size_of(run.state.common)
    own = {"own": size_of(run.kept(1)["model"]) + size_of(run.kept(2)["model"])} if distillation else {}
    assert run.reports[0].traffic.down == {"common": 3 * common}
    assert run.reports[0].traffic.up == {"common": 3 * common, "examples": 3 * 8, **own}


def test_by_algorithm_1_every_message_carries_both_models(play, clouds):
    run = play(replace(ORION, selective=False), clouds("norm2", "norm3"))
    own = size_of(run.kept(0)["model"]) + size_of(run.kept(1)["model"])
    assert run.reports[0].traffic.up == {"own": own, "common": 2 * size_of(run.state.common), "examples": 2 * 8}


def test_the_average_and_the_teachers_are_those_who_replied(play, clouds):
    class Faulty(nn.Linear):
        def forward(self, x):
            raise RuntimeError("out of order")

    federation = clouds("norm2", "mlp3", "norm3")
    faulty = {**federation.architectures, "mlp3": lambda: Faulty(6, 3)}
    run = play(ORION, replace(federation, architectures=faulty), tolerate_failures=True)
    alone = play(ORION, federation, rounds=0)
    alone.round(0, 2)
    assert set(run.reports[0].failures) == {1}
    assert_close(run.state.common, alone.state.common, **EXACTLY)


def test_the_defaults_are_the_papers():
    method = FedORION()
    assert method.training == LocalTraining("sgd", lr=0.01, epochs=10, batch_size=32, momentum=0.9)
    assert method.server_training == LocalTraining("sgd", lr=0.001, epochs=5, batch_size=128, momentum=0.9)
    assert (method.order, method.noise, method.mutual_from, method.noise_batches) == ("sequential", "gaussian", 0, None)
    assert all((method.selective, method.mutual, method.aggregation, method.distillation))
    assert method.needs() == {Need.CLASSES, Need.REAL_INPUTS}


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("mutual_from", 1.5, "mutual_from: expected at least 0 and at most 1, found 1.5"),
        ("mutual_from", -0.1, "mutual_from: expected at least 0 and at most 1, found -0.1"),
        ("noise_batches", 0, "noise_batches: expected at least 1, found 0"),
        ("server_training", LocalTraining(batch_size=1), "server_training.batch_size: expected at least 2, .* found 1"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(field, value, found):
    with pytest.raises(ValueError, match=found):
        FedORION(**{field: value})


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"mutual": False}, "selective: expected false with mutual=false, by which no client .* labels, found True"),
        ({"selective": False, "mutual_from": 0.5}, "mutual_from: expected 0 with selective=false, .* found 0.5"),
    ],
)
def test_who_skips_mutual_learning_where_nobody_can_is_refused(fields, found):
    with pytest.raises(ConfigError, match=found):
        FedORION(**fields)


def test_a_server_that_neither_averages_nor_distils_is_refused():
    with pytest.raises(ValueError, match="expected one of them, found neither"):
        FedORION(aggregation=False, distillation=False)


def test_notes__tell_the_loss_of_the_distillation_if_there_is_one(play, strangers):
    def noted(**changes):
        return play(replace(ORION, **changes), strangers("norm2", "mlp3"), rounds=1).reports[0].notes

    still, moving = (noted(server_training=replace(NOISY, lr=lr))["distillation_loss"] for lr in (0.0, 0.5))
    assert moving < still  # the student has come nearer to its teachers
    assert noted(distillation=False) == {}
