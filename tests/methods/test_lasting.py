"""Optimisers that last: which fits of a method have one in common, and what a client stores of them."""

from dataclasses import fields, replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.requests.fit import LocalTraining
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method, list_methods
from potluck.testing.worlds import World, quick, run_rounds, toy_federation

LASTS = LocalTraining(lr=0.02, batch_size=64, persist=True)
STILL = LocalTraining("sgd", lr=0.0, batch_size=64)


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("name", "second", "stored"),
    [
        ("cronus", "distillation", {"train", "digest"}),
        ("dsfl", "distillation", {"local_update", "distil"}),
        ("fccl", "correlation", {"train", "learn_from_others"}),
        ("fdmeta", "distillation", {"local_update", "distil"}),
        ("fedh2l", "mutual", {"learn_and_predict", "learn_from_peers"}),
        ("fedmd", "digestion", {"train", "digest"}),
        ("ktpfl", "distillation", {"train", "digest"}),
        ("rhfl", "distillation", {"train", "learn_from_others"}),
    ],
)
def test_a_client_stores_one_optimiser_for_each_of_two_trainings_all_of_which_have_run(
    play, clouds, name, second, stored
):
    """Each optimiser has taken as many steps as its training has had fits of one step, the pre-training included."""
    federation = clouds("mlp2", "mlp3", public=30)
    federation = replace(federation, public_labels=True)
    pretrained = {"fccl", "fedmd", "ktpfl", "rhfl", "cronus"}
    run = play(get_method(name)(**{"training": LASTS, second: LASTS}), federation, rounds=3)
    moments = run.kept(0)["moments"]
    assert set(moments) == stored
    first, *others = sorted(stored, key=lambda known: known not in ("train", "local_update", "learn_and_predict"))
    steps = {known: int(moments[known][0]["state"]["head.weight"]["step"]) for known in stored}
    assert steps[first] == 3 + (name in pretrained)
    assert [steps[known] for known in others] == [3 - (name == "dsfl")]


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize(
    ("name", "second"), [("cronus", "distillation"), ("fedmd", "digestion"), ("ktpfl", "distillation")]
)
def test_pretraining_begins_the_optimiser_of_the_revisits(play, clouds, name, second):
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(get_method(name)(**{"training": LASTS, second: STILL}), federation, rounds=0)
    net, own = run.model(0), federation.sites[0].train
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for fits in (2, 1):  # the first round's is after the pre-training
        run.round()
        for _ in range(fits):
            optimizer.zero_grad()
            F.cross_entropy(net(own.inputs), own.targets).backward()
            optimizer.step()
        assert_close(run.model(0).state_dict(), net.state_dict(), rtol=0, atol=1e-9)


def test_what_happens_once_stores_no_optimiser(play, clouds):
    federation = replace(clouds("mlp2", "mlp3", public=30), public_labels=True)
    taught = get_method("fedmd")(STILL, STILL, public_labels=True, public_training=LASTS)
    assert "moments" not in play(taught, federation, rounds=2).kept(0)


def test_the_two_nets_of_fedkemf_and_the_pieces_of_fedepth_have_an_optimiser_each(play, clouds):
    alone = play(get_method("fedkemf")(LASTS, mutual=False), clouds("mlp2", "mlp3", public=30))
    assert set(alone.kept(1)["moments"]) == {"own", "common"}
    pieces = play(get_method("fedepth")(LASTS), clouds("mlp3", capacities=(0.7,)), rounds=2).kept(0)["moments"]
    assert len(pieces) > 1
    assert set(pieces) == {f"piece{number}" for number in range(len(pieces))}


def test_own_and_shared_weights_of_feddpa_have_an_optimiser_each_whichever_trains_first(play, clouds):
    run = play(get_method("feddpa")(LASTS, threshold=0.99), clouds("mlp2", "mlp2"), rounds=2)
    assert set(run.kept(0)["moments"]) == {"own", "shared"}


def trainings_of(name):
    method = get_method(name)()
    return [spec.name for spec in fields(method) if isinstance(getattr(method, spec.name), LocalTraining)]


TRAININGS = [(name, key) for name in list_methods() for key in trainings_of(name) if key != "training"]


def lasting(method, key):
    """The method with an optimiser that lasts; None where it says at once that this one cannot."""
    try:
        return replace(method, **{key: replace(getattr(method, key), persist=True)})
    except ConfigError:
        return None


@pytest.mark.rotates
@pytest.mark.parametrize(("name", "key"), TRAININGS, ids=map("-".join, TRAININGS))
def test_an_optimiser_that_cannot_last_is_refused_before_anybody_trains(name, key):
    """A server's, that is; any other lasts through a run."""
    method = quick(get_method(name))
    if (lasts := lasting(method, key)) is not None:
        federation = replace(toy_federation(World(clients=2).fit_for(method)), public_labels=True)
        run_rounds(Engine(lasts, federation), 2)
