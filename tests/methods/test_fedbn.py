"""FedBN: BatchNorm stays, all else is averaged."""

import torch
from torch.testing import assert_close

from potluck.core.needs import Offer
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedbn import BATCHNORM, FedBN

FULL = LocalTraining("sgd", lr=0.1, batch_size=64)


def test_nothing_of_a_batch_norm_crosses_the_wire(play, clouds):
    run = play(FedBN(FULL), clouds("norm2", "norm3"), rounds=2)
    norms = {f"stages.stage{i}.1" for i in range(3)}
    for direction in (run.wire.sent, run.wire.replied):
        for exchange in direction["local_update"]:
            for message in exchange.values():
                assert "buffers" not in message
                assert not [name for name in message["weights"] if name.rsplit(".", 1)[0] in norms]
                assert "stages.stage0.0.weight" in message["weights"]


def test_clients_have_scales_and_statistics_of_their_own_and_all_else_in_common(play, clouds):
    run = play(FedBN(FULL), clouds("norm2", "norm2", seed=3), rounds=2)
    one, two = (run.model(id).state_dict() for id in (0, 1))
    for name in one:
        own = ".1." in name and not name.endswith("num_batches_tracked")
        assert torch.equal(one[name], two[name]) != own, name


def test_the_mean_is_plain(play, clouds):
    run = play(FedBN(FULL), clouds("norm2", "norm2", sizes=(12, 20)))
    sent = [run.wire.replied["local_update"][0][id]["weights"]["head.bias"] for id in (0, 1)]
    assert_close(run.state.weights["all"]["head.bias"], (sent[0] + sent[1]) / 2)


def test_a_user_is_told_of_networks_without_batch_norm(clouds):
    assert BATCHNORM.caution(Offer.of(clouds("norm2", "norm3"))) is None
    assert "mlp2" in BATCHNORM.caution(Offer.of(clouds("norm2", "mlp2")))
