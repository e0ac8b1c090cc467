import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.federation import Federation, Site
from potluck.core.nets.weights import mean_where_present, minus, plus
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.roles import ClientFailure
from potluck.methods.fedavg import FedAvg
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
DEEP = "stages.hidden2.linear.weight"  # only mlp3 has it
BUFFER_POLICIES = ["average", "local", "drop"]


def random_layers(seed, *names):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 2, generator=generator) for name in names}


# Layer by layer: FedIN's revision, eq. 19


@pytest.mark.parametrize("scope", ["model", "architecture"])
def test_with_one_architecture_the_mean_by_layer_is_plain_fedavg(play, clouds, scope):
    federation = clouds("norm2", "norm2", "norm2")
    by_layer = play(FedAvg(sharing=Sharing("layer", "uniform")), federation, rounds=2)
    plain = play(FedAvg(sharing=Sharing(scope, "uniform")), federation, rounds=2)
    assert_close(list(by_layer.state.weights.values()), list(plain.state.weights.values()), **EXACTLY)


def test_a_layer_of_one_drawn_client_is_copied_bit_for_bit(play, clouds):
    run = play(FedAvg(), clouds("mlp2", "mlp3", "mlp3"), rounds=0)
    run.round(0, 2)
    reply = run.wire.replied["local_update"][0][2]["weights"]
    assert_close(run.state.weights["all"][DEEP], reply[DEEP], **EXACTLY)


def test_a_layer_that_nobody_drawn_owns_keeps_its_value_bit_for_bit(play, clouds):
    run = play(FedAvg(), clouds("norm2", "norm3"), rounds=2)
    run.round(0)
    before, after = (state.weights["all"] for state in run.states[-2:])
    kept = [name for name in after if name.startswith("stages.stage2.")]
    assert len(kept) == 7  # two tensors of the linear layer, two weights and three buffers of the norm
    for name in kept:
        assert_close(after[name], before[name], **EXACTLY)
    assert not torch.equal(after["head.weight"], before["head.weight"])


def test_a_shared_layer_lies_between_its_owners(play, clouds):
    run = play(FedAvg(), clouds("mlp2", "mlp3", "mlp3"))
    replies = run.wire.replied["local_update"][0]
    for name, merged in run.state.weights["all"].items():
        owners = torch.stack([r["weights"][name] for r in replies.values() if name in r["weights"]])
        assert len(owners) == (2 if "hidden2" in name else 3)
        assert (merged >= owners.amin(0) - 1e-6).all()
        assert (merged <= owners.amax(0) + 1e-6).all()


def test_the_order_of_clients_does_not_matter():
    owned = [random_layers(0, "a", "b"), random_layers(1, "a"), random_layers(2, "b", "a")]
    shares = [1.0, 2.0, 5.0]
    expected = mean_where_present(owned, shares, keep={})
    for order in itertools.permutations(range(3)):
        permuted = mean_where_present([owned[i] for i in order], [shares[i] for i in order], keep={})
        assert_close(permuted, expected)


def test_the_mean_of_equal_models_is_that_model():
    model = random_layers(0, "a", "b")
    assert_close(mean_where_present([model] * 3, [1.0, 2.0, 4.0], keep={}), model, rtol=1e-6, atol=0)
    assert_close(mean_where_present([model] * 2, [3.0, 3.0], keep={}), model, **EXACTLY)


def test_averaging_changes_is_averaging_weights():
    before = random_layers(0, "a", "b", "nobody's")
    after = [random_layers(1, "a", "b"), random_layers(2, "a")]
    shares = [1.0, 3.0]
    changes = [minus(weights, before) for weights in after]
    by_change = plus(before, mean_where_present(changes, shares, keep={}))
    assert_close(by_change, mean_where_present(after, shares, keep=before))


@pytest.mark.parametrize(("shares", "expected"), [((1, 1, 1), 3.0), ((10, 20, 30), 23 / 6)])
def test_owners_are_weighed(shares, expected):
    # (1 + 2 + 6) / 3 = 3; (10 * 1 + 20 * 2 + 30 * 6) / 60 = 230 / 60
    owned = [{"w": torch.tensor([value])} for value in (1.0, 2.0, 6.0)]
    assert mean_where_present(owned, shares, keep={})["w"].item() == pytest.approx(expected)


def test_a_client_twice_is_a_client_of_double_weight():
    one, two = random_layers(0, "a"), random_layers(1, "a")
    twice = mean_where_present([one, one, two], [2.0, 2.0, 3.0], keep={})
    assert_close(twice, mean_where_present([one, two], [4.0, 3.0], keep={}))


def test_means_leave_their_arguments_unchanged():
    owned, keep = [random_layers(0, "a"), random_layers(1, "a")], random_layers(2, "a", "b")
    mean_where_present(owned, [1.0, 1.0], keep)
    assert_close(owned, [random_layers(0, "a"), random_layers(1, "a")], **EXACTLY)
    assert_close(keep, random_layers(2, "a", "b"), **EXACTLY)


def test_layers_of_one_name_and_two_shapes_are_refused_with_advice(play, clouds):
    with pytest.raises(ValueError, match=r"layer stages\..* sharing.scope = 'architecture'"):
        play(FedAvg(), clouds("mlp2", "wide2"))


def test_a_shared_layer_starts_as_the_largest_architecture_has_it(play, clouds):
    run = play(FedAvg(), clouds("mlp2", "mlp3"), rounds=0)
    assert_close(run.state.weights["all"], dict(run.engine.server(0).build("mlp3").state_dict()), **EXACTLY)


def test_a_client_that_was_not_drawn_is_judged_with_the_newest_weights(play, clouds):
    run = play(FedAvg(), clouds("mlp2", "mlp3"), rounds=0)
    run.round(0)
    for name, weight in run.model(1).state_dict().items():
        assert_close(weight, run.state.weights["all"][name], **EXACTLY)


# Within architectures: FedIN's revision, eq. 20 and 21


def test_a_group_of_one_client_trains_locally(play, clouds):
    together = play(
        FedAvg(sharing=Sharing("architecture")), clouds("mlp2", "mlp3", "wide2", sizes=(9, 12, 15)), rounds=3
    )
    alone = play(FedAvg(sharing=Sharing("architecture")), clouds("mlp3", sizes=(12,), first_id=1), rounds=3)
    assert_close(together.state.weights["mlp3"], alone.state.weights["mlp3"], **EXACTLY)


def test_a_group_does_not_depend_on_the_others_data(play, clouds):
    federation, other = clouds("mlp2", "mlp2", "mlp3"), clouds("mlp2", "mlp2", "mlp3", seed=1)
    mixed = Federation(
        {**federation.sites, 2: other.sites[2]}, federation.architectures, "mlp2", federation.num_classes
    )
    method = FedAvg(sharing=Sharing("architecture"))
    first, second = play(method, federation, rounds=2), play(method, mixed, rounds=2)
    assert_close(first.state.weights["mlp2"], second.state.weights["mlp2"], **EXACTLY)
    assert not torch.equal(first.state.weights["mlp3"][DEEP], second.state.weights["mlp3"][DEEP])


def test_a_group_that_nobody_is_drawn_from_is_untouched(play, clouds):
    run = play(FedAvg(sharing=Sharing("architecture")), clouds("norm2", "norm3", "norm3"), rounds=1)
    run.round(1, 2)
    before, after = (state.weights for state in run.states[-2:])
    assert_close(after["norm2"], before["norm2"], **EXACTLY)
    assert not torch.equal(after["norm3"]["head.weight"], before["norm3"]["head.weight"])


@pytest.mark.parametrize(("weighting", "share"), [("samples", 12 / 32), ("uniform", 1 / 2)])
def test_within_a_group_clients_are_weighed(play, clouds, weighting, share):
    run = play(FedAvg(sharing=Sharing("architecture", weighting)), clouds("mlp2", "mlp2", "mlp3"))
    one, two = (run.wire.replied["local_update"][0][id]["weights"] for id in (0, 1))
    expected = {name: share * one[name] + (1 - share) * two[name] for name in one}
    assert_close(run.state.weights["mlp2"], expected)


# Buffers


def test_averaged_buffers_are_weighed_like_weights_and_counters_give_their_maximum(play, clouds):
    run = play(FedAvg(LocalTraining(batch_size=4)), clouds("norm2", "norm2"))
    one, two = (reply["buffers"] for reply in run.wire.replied["local_update"][0].values())
    share = 12 / 32
    pool = run.state.weights["all"]
    for name in one:
        if name.endswith("num_batches_tracked"):
            assert (one[name].item(), two[name].item()) == (3, 5)
            assert pool[name].item() == 5
            assert pool[name].dtype == torch.int64
        else:
            assert_close(pool[name], share * one[name] + (1 - share) * two[name])


@pytest.mark.parametrize("buffers", ["local", "drop"])
def test_buffers_that_are_not_averaged_never_cross_the_wire(play, clouds, buffers):
    run = play(FedAvg(sharing=Sharing(buffers=buffers)), clouds("norm2", "norm3"), rounds=2)
    assert set(run.reports[1].traffic.down) == {"weights"}
    assert set(run.reports[1].traffic.up) == {"weights", "examples"}


def test_a_model_without_buffers_sends_none(play, clouds):
    run = play(FedAvg(), clouds("mlp2"))
    assert set(run.reports[0].traffic.down) == {"weights"}


def test_local_buffers_stay_with_their_client(play, clouds):
    federation = clouds("norm2", "norm2", sizes=(12, 20))
    run = play(FedAvg(LocalTraining(batch_size=4), Sharing(buffers="local")), federation)
    run.round(0)
    counters = [run.model(id).state_dict()["stages.stage0.1.num_batches_tracked"].item() for id in (0, 1)]
    assert counters == [3 + 3, 5]
    assert_close(dict(run.model(1).named_buffers()), run.kept(1)["state"]["buffers"], **EXACTLY)
    one, two = (run.model(id).state_dict()["stages.stage0.1.running_mean"] for id in (0, 1))
    assert not torch.allclose(one, two)


def test_local_buffers_go_on_from_where_they_were(play, clouds):
    # At a rate of 0 the batch mean stays, and each of the two rounds takes a tenth of it into the running one.
    training = LocalTraining("sgd", lr=0.0, batch_size=64)
    federation = clouds("norm2", "norm2")
    run = play(FedAvg(training, Sharing(buffers="local")), federation, rounds=2)
    inputs = federation.sites[1].train.inputs
    mean = run.model(1).stages[0][0](inputs).mean(0).detach()
    assert_close(run.model(1).stages[0][1].running_mean, (1 - 0.9**2) * mean)


def test_a_client_that_was_never_drawn_has_no_local_buffers_and_measures_them(play, clouds):
    federation = clouds("norm2", "norm2")
    run = play(FedAvg(sharing=Sharing(buffers="local")), federation, rounds=0)
    run.round(0)
    assert run.kept(1) == {"state": {}}
    linear, norm, _ = run.model(1).stages[0]
    read = linear(federation.sites[1].train.inputs).detach()
    assert_close(norm.running_mean, read.mean(0))
    assert_close(norm.running_var, read.var(0))


def test_dropped_buffers_are_not_kept(play, clouds):
    run = play(FedAvg(sharing=Sharing(buffers="drop")), clouds("norm2", "norm2"), rounds=2)
    assert run.kept(0) == {"state": {}}
    fresh = {name: b for name, b in run.states[0].weights["all"].items() if "running" in name}
    assert_close({name: run.state.weights["all"][name] for name in fresh}, fresh, **EXACTLY)


def test_dropped_buffers_are_measured_on_the_clients_own_data_when_it_is_judged(play, clouds):
    federation = clouds("norm2", "norm2")
    run = play(FedAvg(sharing=Sharing(buffers="drop")), federation)
    for id, site in federation.sites.items():
        linear, norm, _ = run.model(id).stages[0]
        hidden = linear(site.train.inputs).detach()
        assert_close(norm.running_mean, hidden.mean(0))
        assert_close(norm.running_var, hidden.var(0))


@pytest.mark.parametrize("buffers", BUFFER_POLICIES)
def test_the_policy_for_buffers_does_not_change_the_weights(play, clouds, buffers):
    federation = clouds("norm2", "norm3")
    averaged = play(FedAvg(), federation, rounds=2)
    run = play(FedAvg(sharing=Sharing(buffers=buffers)), federation, rounds=2)
    for name in run.engine.federation.roster[1].parameters:
        assert_close(run.state.weights["all"][name], averaged.state.weights["all"][name], **EXACTLY)


@pytest.mark.parametrize(("buffers", "shared"), [("average", True), ("local", False), ("drop", False)])
def test_there_is_one_global_model_only_if_its_buffers_are_shared(play, clouds, buffers, shared):
    sharing = Sharing(buffers=buffers)
    normed = play(FedAvg(sharing=sharing), clouds("norm2", "norm2"))
    plain = play(FedAvg(sharing=sharing), clouds("mlp2", "mlp2"))
    mixed = play(FedAvg(sharing=sharing), clouds("mlp2", "mlp3"))
    assert (normed.engine.global_model(normed.state) is not None) == shared
    assert plain.engine.global_model(plain.state) is not None
    assert mixed.engine.global_model(mixed.state) is None


def test_measured_statistics_do_not_depend_on_the_order_in_which_examples_are_stored(play):
    # 128 zeros and then 128 tens: mixed batches have a variance near 25, batches of one class have none.
    inputs = torch.cat([torch.zeros(128, 1), 10 * torch.ones(128, 1)])
    train = Examples(inputs, (inputs[:, 0] > 0).long())
    federation = one_client(train, lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)))
    run = play(FedAvg(sharing=Sharing(buffers="drop")), federation)
    assert run.model(0)[0].running_var.item() == pytest.approx(25, rel=0.1)


def test_judging_a_model_leaves_the_global_generator_alone(play):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    train = Examples(inputs, torch.arange(8) % 2)
    federation = one_client(
        train, lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    )
    run = play(FedAvg(sharing=Sharing(buffers="drop")), federation)
    before = torch.get_rng_state()
    first = run.model(0).state_dict()
    assert_close(torch.get_rng_state(), before, **EXACTLY)
    assert_close(run.model(0).state_dict(), first, **EXACTLY)


def test_a_client_with_too_few_examples_for_batch_norm_fails_with_a_reason(play, clouds):
    with pytest.raises(ClientFailure, match="1 training examples; expected at least 2"):
        play(FedAvg(), clouds("norm2", sizes=(1,)))


def one_client(train, builder):
    return Federation({0: Site(0, "net", train, train, train)}, {"net": builder}, "net", num_classes=2)
