import math

import pytest
import torch
from torch import nn

from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining, watching

DATA = Examples(torch.zeros(2, 1), torch.zeros(2))


def fit(**changes):
    return Fit(**{"net": nn.Identity(), "objectives": loss, "data": DATA, "training": LocalTraining(), **changes})


def loss(net, batch, extras):
    return torch.zeros(())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"lr": -0.1}, "lr: expected at least 0, found -0.1"),
        ({"lr": math.nan}, "lr: expected a finite number, found nan"),
        ({"epochs": 0}, "epochs: expected at least 1, found 0"),
        ({"batch_size": 0}, "batch_size: expected at least 1, found 0"),
        ({"weight_decay": -1.0}, "weight_decay: expected at least 0, found -1.0"),
        ({"steps": 0}, "steps: expected at least 1, found 0"),
        ({"optimizer": "sgd", "momentum": 1.0}, "momentum: expected at least 0 and below 1, found 1.0"),
        ({"optimizer": "sgd", "momentum": -0.1}, "momentum: expected at least 0 and below 1, found -0.1"),
        (
            {"optimizer": "sgd", "momentum": math.nan},
            "momentum: expected a finite number, found nan",
        ),
        ({"momentum": 0.9}, "momentum: belongs to the optimizer 'sgd', found it with 'adam'"),
        ({"clip_norm": 0.0}, "clip_norm: expected above 0, found 0.0"),
        ({"clip_norm": math.nan}, "clip_norm: expected a finite number, found nan"),
        ({"optimizer": "adamm"}, "optimizer: found 'adamm', expected the name of a class .*; nearest: 'adam'"),
        ({"optimizer": "optimizer"}, "optimizer: found 'optimizer'"),
        ({"optimizer": "LBFGS"}, "optimizer: found 'LBFGS', which cannot be used: it evaluates the loss several times"),
        ({"optimizer": 3}, "optimizer: expected text, found 3"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "weight_decay: the optimizer 'rprop' has none; expected 0"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(changes, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}"):
        LocalTraining(**changes)


def test_the_ends_of_the_ranges_are_allowed():
    LocalTraining(lr=0, epochs=1, batch_size=1, weight_decay=0, steps=1, clip_norm=1e-9)
    LocalTraining(optimizer="sgd", momentum=0.999)


def test_the_defaults_are_the_papers():
    default = LocalTraining()
    assert (default.optimizer, default.lr, default.epochs, default.batch_size) == ("adam", 0.001, 1, 16)
    assert (default.steps, default.momentum, default.weight_decay, default.clip_norm) == (
        None,
        0.0,
        0.0,
        None,
    )


def test_one_objective_or_several_read_alike():
    assert fit().losses == (loss,)
    assert fit(objectives=[loss, loss]).losses == (loss, loss)


def test_trainable_names_are_prefixes():
    assert fit().trains("anything")
    some = fit(trainable=("head", "stages.1."))
    assert some.trains("head.weight")
    assert some.trains("stages.1.bias")
    assert not some.trains("stages.10.bias")
    assert not some.trains("body.head")
    assert not fit(trainable=()).trains("head.weight")


def test_turns_name_what_is_trained_within_what_is_trainable():
    some = fit(objectives=[loss, loss], turns=[("a.",), ("b.", "c.")])
    assert [name for name in ("a.w", "b.w", "c.w", "d.w") if some.trains(name)] == ["a.w", "b.w", "c.w"]
    narrower = fit(trainable=("b.",), turns=[("a.", "b.")])
    assert [name for name in ("a.w", "b.w", "c.w", "d.w") if narrower.trains(name)] == ["b.w"]


def test_there_is_one_turn_an_objective():
    with pytest.raises(ValueError, match=r"^turns: expected one for each of 2 objectives, found 1$"):
        fit(objectives=[loss, loss], turns=[("a.",)])


def test_fits_built_while_watched_are_seen():
    unseen = fit()
    with watching() as built:
        first, second = fit(), fit()
    later = fit()
    assert built == [first, second]
    assert not {id(unseen), id(later)} & {id(one) for one in built}
    assert not any(one.done for one in built)


def test_an_inner_watch_is_apart_from_the_outer():
    with watching() as outer:
        with watching() as inner:
            fit()
        own = fit()
    assert len(inner) == 1
    assert outer == [own]


def test_watching_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), watching() as built:
        raise ZeroDivisionError
    fit()
    assert built == []
