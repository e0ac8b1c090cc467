import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.nets.weights import load, weights_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.moon import MOON, ContrastiveLoss, contrastive, representation
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
BOTH = ["norm2", "mlp3"]


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


# The loss (eq. 3, 4)


def test_contrastive__is_the_papers_on_a_small_batch():
    z, near, far = rows([1.0, 0.0], [0.0, 2.0]), rows([3.0, 0.0], [1.0, 1.0]), rows([0.0, 1.0], [0.0, -5.0])
    similar = [(1.0, 0.0), (math.sqrt(0.5), -1.0)]
    expected = [-math.log(math.exp(g / 0.5) / (math.exp(g / 0.5) + math.exp(p / 0.5))) for g, p in similar]
    assert_close(contrastive(z, near, far, 0.5), torch.tensor(sum(expected) / 2))


def test_contrastive__does_not_depend_on_the_length_of_features():
    z, one, two = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    assert_close(contrastive(7 * z, one, 0.1 * two, 0.3), contrastive(z, one, two, 0.3))


def test_contrastive__of_equal_nets_is_log_2_and_has_no_gradient():
    z, other = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    loss = contrastive(z.requires_grad_(), other, other, 0.5)
    assert loss.item() == pytest.approx(math.log(2))
    (gradient,) = torch.autograd.grad(loss, z)
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-7)


def test_contrastive__is_finite_at_small_temperatures():
    z = rows([1.0, 0.0])
    assert contrastive(z, -z, z, 0.001).item() == pytest.approx(2000)


def test_contrastive_loss__trains_the_net_and_neither_of_the_nets_it_reads(clouds, play):
    run = play(MOON(), clouds("mlp2"), rounds=0)
    net, one, two = (run.engine.server(1).build("mlp2") for _ in range(3))
    for other, shift in ((one, 0.1), (two, -0.2)):
        load(other, {name: tensor + shift * tensor.sign() for name, tensor in weights_of(other).items()})
    batch = run.engine.federation.sites[0].train.batch(torch.arange(8))
    loss = ContrastiveLoss(F.cross_entropy, 2.0, 0.5)(net, batch, {"global": one, "previous": two})
    parts = [representation(each, batch.inputs) for each in (net, one, two)]
    assert_close(loss, F.cross_entropy(net(batch.inputs), batch.targets) + 2 * contrastive(*parts, 0.5))
    loss.backward()
    assert all(parameter.grad is None for other in (one, two) for parameter in other.parameters())
    assert net.stages[0].linear.weight.grad.any()


# A round


def test_a_client_step_is_the_papers(play, clouds):
    federation = clouds(*BOTH)
    run = play(MOON(FULL, mu=3.0), federation, rounds=2)
    for id, architecture in enumerate(BOTH):
        sent = run.wire.sent["local_update"][1][id]
        twin = run.engine.server(1).build
        net, common, previous = (twin(architecture) for _ in range(3))
        for each in (net, common):
            load(each, {**sent["weights"], **(sent.get("buffers") or {})}, partial=True)
        first = run.wire.replied["local_update"][0][id]
        load(previous, {**first["weights"], **(first.get("buffers") or {})}, partial=True)
        data = federation.sites[id].train
        loss = ContrastiveLoss(F.cross_entropy, 3.0, 0.5)(
            net.train(), Batch(data.inputs, data.targets, {}), {"global": common.eval(), "previous": previous.eval()}
        )
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        found = run.wire.replied["local_update"][1][id]["weights"]
        for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
            assert_close(found[name], (parameter - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6)


def test_the_previous_model_is_that_of_the_clients_own_last_training(play, clouds):
    run = play(MOON(FULL), clouds(*BOTH), rounds=0)
    run.round()
    first = run.kept(1)["state"]["previous"]
    assert_close({n: first[n] for n in dict(run.model(1).named_parameters())},
                 run.wire.replied["local_update"][0][1]["weights"], **EXACTLY)  # fmt: skip
    run.model(1)  # an evaluation is no training
    run.round(0)
    run.round(0)
    assert_close(run.kept(1)["state"]["previous"], first, **EXACTLY)
    run.round(0, 1)
    assert not torch.equal(run.kept(1)["state"]["previous"]["head.weight"], first["head.weight"])


def test_a_client_that_has_never_trained_trains_as_with_fedavg(play, clouds):
    runs = [play(method, clouds("mlp2", "mlp2"), rounds=0) for method in (MOON(FULL), FedAvg(FULL))]
    for run in runs:
        run.round(0)
        run.round(1)  # drawn for the first time, in the second round
    mine, theirs = (run.wire.replied["local_update"][1][1] for run in runs)
    assert_close(mine["weights"], theirs["weights"], **EXACTLY)
    for run in runs:
        run.round(0, 1)
        run.round(1)  # its own last model and the global one are two by now
    mine, theirs = (run.wire.replied["local_update"][3][1]["weights"] for run in runs)
    assert any(not torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_without_mu_nothing_is_kept(play, clouds):
    run = play(MOON(FULL, mu=0.0, sharing=Sharing(buffers="average")), clouds(*BOTH), rounds=2)
    assert run.engine.store.read(0) is None or "previous" not in run.kept(0)["state"]


@pytest.mark.parametrize("changes", [{"mu": -1.0}, {"temperature": 0.0}])
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(MOON(), **changes)


def test_representation__is_what_the_last_layer_reads(play, clouds):
    net = play(MOON(), clouds("mlp2"), rounds=0).model(0)
    inputs = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    assert representation(net, inputs).shape == (1, net.num_features)  # also of one example
    assert_close(net.head(representation(net, inputs)), nn.Module.__call__(net, inputs))
