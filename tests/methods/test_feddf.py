from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.needs import Need
from potluck.core.nets.weights import load
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.feddf import FedDF
from potluck.parts.means import Aggregate
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
BY_ARCHITECTURE = Sharing("architecture")
STILL = LocalTraining("sgd", lr=0.0, batch_size=64)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
ONE_STEP = FedDF(FULL, FULL)
BOTH_ENSEMBLES = pytest.mark.parametrize("ensemble", ["logits", "probabilities"])


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


def teachers_of(run):
    """The clients' models of the last round, as the server receives them."""
    federation = run.engine.federation
    for id, reply in run.wire.replied["local_update"][-1].items():
        net = federation.architectures[federation.sites[id].architecture]()
        yield load(net, {**reply["weights"], **reply.get("buffers", {})}).eval()


def targets_of(run, ensemble="logits"):
    """The target of the distillation: a distribution for each public example."""
    public = run.engine.federation.public.inputs
    with torch.no_grad():
        logits = torch.stack([net(public) for net in teachers_of(run)])
    return logits.mean(0).softmax(1) if ensemble == "logits" else logits.softmax(2).mean(0)


# Prototypes


def test_without_distillation_prototypes_are_fedavg_s(play, clouds):
    federation = clouds("mlp2", "mlp3", "mlp2", "wide2", public=30)
    still = play(FedDF(server_training=STILL), federation, rounds=2)
    plain = play(FedAvg(sharing=BY_ARCHITECTURE), federation, rounds=2)
    assert_close(still.state.weights, plain.state.weights, **EXACTLY)


@BOTH_ENSEMBLES
def test_a_distillation_step_is_the_papers(play, clouds, ensemble):
    """Each prototype: a step on KL(ensemble || prototype), by autograd through the divergence itself."""
    federation = clouds("mlp2", "mlp3", "mlp2", "wide2", public=30)
    method = replace(ONE_STEP, ensemble=ensemble)
    run = play(method, federation)
    averages = play(replace(method, server_training=STILL), federation).state.weights
    targets = targets_of(run, ensemble)
    for p in ("mlp2", "mlp3", "wide2"):
        student = load(federation.architectures[p](), averages[p])
        student_log = F.log_softmax(student(federation.public.inputs), 1)
        full_step(student, (targets * (targets.log() - student_log)).sum() / 30)
        assert_close(run.state.weights[p], dict(student.state_dict()))


def test_the_average_counts_clients_by_examples(play, clouds):
    federation = clouds("mlp2", "mlp2", public=30, sizes=(3, 60))
    run = play(replace(ONE_STEP, server_training=STILL), federation)
    first, second = (reply["weights"] for reply in run.wire.replied["local_update"][0].values())
    for name, tensor in run.state.weights["mlp2"].items():
        assert_close(tensor, (3 * first[name] + 60 * second[name]) / 63)


def test_all_students_learn_from_the_teachers_as_they_came(play, clouds):
    """Otherwise the second prototype would learn from a first that has already been distilled."""
    federation = clouds("mlp2", "mlp3", public=30)
    fast = FedDF(FULL, LocalTraining("sgd", lr=1.0, epochs=3, batch_size=64))
    run = play(fast, federation)
    student = load(federation.architectures["mlp3"](), run.wire.replied["local_update"][0][1]["weights"])
    targets = targets_of(run)
    optimizer = torch.optim.SGD(student.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        F.kl_div(F.log_softmax(student(federation.public.inputs), 1), targets, reduction="batchmean").backward()
        optimizer.step()
    assert_close(run.state.weights["mlp3"], dict(student.state_dict()), rtol=1e-4, atol=1e-5)


def test_distillation_brings_every_prototype_nearer_to_the_ensemble(play, clouds):
    labels = ((0, 1), (1, 2), (0, 2), (0, 1, 2))
    federation = clouds("mlp2", "norm3", "mlp2", "norm3", public=40, labels=labels)
    training = LocalTraining(lr=0.02, epochs=10)
    run = play(FedDF(training, LocalTraining(lr=0.01, epochs=10)), federation)
    averages = play(FedDF(training, STILL), federation).state.weights  # BatchNorm's statistics move, weights do not
    targets = targets_of(run)
    for p in ("mlp2", "norm3"):
        gaps = [
            float((targets * (targets.log() - F.log_softmax(net(federation.public.inputs), 1))).sum().detach())
            for net in (load(federation.architectures[p](), pool[p]).eval() for pool in (averages, run.state.weights))
        ]
        assert 0 < gaps[1] < 0.7 * gaps[0]


def test_a_prototype_that_nobody_trained_is_distilled_from_where_it_was(play, clouds):
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(FedDF(FULL, STILL), federation, rounds=0)
    run.round(0)
    assert_close(run.states[1].weights["mlp3"], run.states[0].weights["mlp3"], **EXACTLY)
    taught = play(ONE_STEP, federation, rounds=0)
    taught.round(0)
    assert not torch.equal(taught.state.weights["mlp3"]["head.weight"], run.state.weights["mlp3"]["head.weight"])


def test_teachers_predict_in_evaluation_mode_and_students_keep_the_public_statistics(play, clouds):
    federation = clouds("norm2", "norm2", public=30)
    run = play(FedDF(FULL, STILL), federation)
    averages = play(FedAvg(FULL, BY_ARCHITECTURE), federation).state.weights["norm2"]
    moved = {name for name, tensor in run.state.weights["norm2"].items() if not torch.equal(tensor, averages[name])}
    assert {name.rpartition(".")[2] for name in moved} == {"running_mean", "running_var", "num_batches_tracked"}
    loss = run.reports[0].notes["distillation_loss"]
    student = load(federation.architectures["norm2"](), averages).train()
    logs = F.log_softmax(student(federation.public.inputs), 1).detach()
    assert loss == pytest.approx(float(-(targets_of(run) * logs).sum(1).mean()), rel=1e-4)


def test_a_robust_rule_combines_predictions_too(play, clouds):
    federation = clouds("mlp2", "mlp2", "mlp2", public=30)
    method = replace(ONE_STEP, ensemble="probabilities", sharing=Sharing("architecture", combine=Aggregate("median")))
    run = play(method, federation)
    weights = [reply["weights"] for reply in run.wire.replied["local_update"][0].values()]
    middle = {name: torch.stack([w[name] for w in weights]).median(0).values for name in weights[0]}
    with torch.no_grad():
        told = torch.stack([net(federation.public.inputs).softmax(1) for net in teachers_of(run)]).median(0).values
    student = load(federation.architectures["mlp2"](), middle)
    targets = told / told.sum(1, keepdim=True)
    full_step(student, -(targets * F.log_softmax(student(federation.public.inputs), 1)).sum() / 30)
    assert_close(run.state.weights["mlp2"], dict(student.state_dict()))


# Who takes part, and what is evaluated


def test_clients_start_from_their_prototype_and_keep_nothing(play, clouds):
    run = play(FedDF(STILL, FULL), clouds("mlp2", "mlp3", "mlp2", public=30), rounds=2)
    sent, replied = run.wire.sent["local_update"][1], run.wire.replied["local_update"][1]
    for id, architecture in enumerate(("mlp2", "mlp3", "mlp2")):
        assert_close(sent[id]["weights"], run.states[1].weights[architecture], **EXACTLY)
        assert_close(replied[id]["weights"], run.states[1].weights[architecture], **EXACTLY)
        assert_close(dict(run.model(id).state_dict()), run.state.weights[architecture], **EXACTLY)
        assert run.kept(id).get("model") is None


def test_those_who_were_not_drawn_do_not_teach(play, clouds):
    federation = clouds("mlp2", "mlp2", "mlp3", public=30)
    run = play(ONE_STEP, federation, rounds=0)
    run.round(0, 1)
    pair = replace(federation, sites={id: federation.sites[id] for id in (0, 1)})
    alone = play(ONE_STEP, pair)
    assert_close(run.state.weights["mlp2"], alone.state.weights["mlp2"], **EXACTLY)


def test_the_global_model_is_the_prototype_or_the_mean_of_their_logits(play, clouds):
    one = play(FedDF(), clouds("mlp2", "mlp2", public=30))
    assert_close(dict(one.engine.global_model(one.state).state_dict()), one.state.weights["mlp2"], **EXACTLY)
    several = play(FedDF(), clouds("mlp2", "norm3", public=30))
    inputs, federation = several.engine.federation.public.inputs, several.engine.federation
    nets = [load(federation.architectures[p](), several.state.weights[p]).eval() for p in ("mlp2", "norm3")]
    found = several.engine.global_model(several.state).eval()(inputs)
    assert_close(found, (nets[0](inputs) + nets[1](inputs)) / 2)


# Public data


def test_public_targets_are_never_read(play, clouds):
    federation = clouds("mlp2", "norm3", public=30)
    foreign = replace(federation, public=Examples(federation.public.inputs, torch.full((30,), torch.nan)))
    own, other = play(FedDF(), federation, rounds=2), play(FedDF(), foreign, rounds=2)
    assert_close(own.state.weights, other.state.weights, **EXACTLY)


def test_public_inputs_are_never_augmented(play, clouds):
    drawn = []

    def note(inputs, rng):
        drawn.append(rng)
        return inputs

    federation = clouds("mlp2", "mlp3", public=30)
    play(FedDF(), replace(federation, public=replace(federation.public, preprocess=note)))
    assert drawn
    assert drawn == [None] * len(drawn)


# Wire and hyper-parameters


def test_messages_are_fedavg_s(play, clouds):
    federation = clouds("norm2", "mlp3", public=30)
    traffic = [play(m, federation).reports[0].traffic for m in (FedDF(), FedAvg(sharing=BY_ARCHITECTURE))]
    assert (traffic[0].up, traffic[0].down) == (traffic[1].up, traffic[1].down)


def test_public_data_are_needed_and_nested_layers_are_not():
    assert FedDF().needs() == {Need.PUBLIC_DATA, Need.CLASSES}


@pytest.mark.parametrize(
    ("sharing", "found"),
    [
        (Sharing("layer"), r"sharing\.scope: expected 'architecture', found 'layer'"),
        (Sharing("architecture", buffers="drop"), r"sharing\.buffers: expected 'average', .* found 'drop'"),
    ],
)
def test_sharing_that_leaves_no_prototypes_is_refused(sharing, found):
    with pytest.raises(ValueError, match=found):
        FedDF(sharing=sharing)
