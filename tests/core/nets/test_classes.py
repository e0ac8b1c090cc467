"""Networks with outputs for some of the federation's classes, seen by others as networks with all."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.classes import OwnClasses, axes_of_classes, own_classes_of, own_outputs, with_classes

OWN = OwnClasses((3, 0, 4), 6)


def net():
    torch.manual_seed(0)
    return with_classes(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), OWN)


X, Y = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 0, 4, 4, 0, 3, 3, 0])


def test_each_output_stands_at_its_class_and_minus_infinity_at_all_others():
    model = net()
    with own_outputs(model):
        own = model(X)
    found = model(X)
    assert_close(found[:, [3, 0, 4]], own)
    assert (found[:, [1, 2, 5]] == -torch.inf).all()
    assert_close(found.softmax(1)[:, [3, 0, 4]], own.softmax(1))


def test_the_loss_and_its_gradients_are_those_of_the_own_outputs_alone():
    model, plain = net(), nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    plain.load_state_dict(model.state_dict())
    local = torch.tensor([OWN.numbers.index(label) for label in Y.tolist()])
    F.cross_entropy(model(X), Y).backward()
    F.cross_entropy(plain(X), local).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(found.grad, expected.grad)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: F.cross_entropy(z, torch.full((8,), 1)),
        lambda z: F.cross_entropy(z, Y, label_smoothing=0.1),
        lambda z: F.mse_loss(z, torch.zeros(8, 6)),
        lambda z: -(torch.full((8, 6), 1 / 6) * z.log_softmax(1)).sum(),
    ],
)
def test_a_loss_that_asks_something_of_other_classes_gives_no_number_that_looks_like_an_answer(loss):
    model = net()
    found = loss(model(X))
    found.backward()
    assert not found.isfinite()
    assert all(parameter.grad.isnan().any() for parameter in model.parameters())


def test_several_clients_at_once_give_what_each_gives_alone():
    model = net()
    weights = [{name: torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(3)]
    stacked = {name: torch.stack([one[name] for one in weights]).requires_grad_() for name in weights[0]}

    def loss(own):
        return F.cross_entropy(functional_call(model, own, (X,)), Y)

    together = torch.autograd.grad(vmap(loss)(stacked).sum(), [*stacked.values()])
    for place, own in enumerate(weights):
        alone = torch.autograd.grad(
            loss(mine := {n: w.clone().requires_grad_() for n, w in own.items()}), [*mine.values()]
        )
        for found, expected in zip(together, alone, strict=True):
            assert_close(found[place], expected)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_their_classes_and_their_names(again):
    model = net()
    other = again(model)
    assert own_classes_of(other) == OWN
    assert [*other.state_dict()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert_close(other(X), model(X))


def test_an_error_inside_leaves_the_network_as_it_was():
    model = net()
    with pytest.raises(ZeroDivisionError), own_outputs(model):
        1 / 0  # noqa: B018
    assert model(X).shape == (8, 6)


@pytest.mark.parametrize("numbers", [(), (0, 0), (6,), (-1, 2)])
def test_numbers_that_are_no_classes_are_refused(numbers):
    with pytest.raises(ConfigError, match="expected different numbers, at least one, from 0 to 5"):
        OwnClasses(numbers, 6)


@pytest.mark.parametrize(
    ("numbers", "text"), [((0, 1, 2), "0-2"), ((0, 1, 4), "0,1,4"), ((3, 0, 4), "3,0,4"), ((2, 3, 4, 5, 0), "2-5,0")]
)
def test_classes_have_a_short_name(numbers, text):
    assert str(OwnClasses(numbers, 6)) == text


def conv(classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, classes, 1), nn.BatchNorm2d(classes))


def test_the_axis_of_classes_is_found_in_weights_and_statistics():
    names = ("2.weight", "2.bias", "3.weight", "3.bias", "3.running_mean", "3.running_var")
    assert axes_of_classes(conv(4), conv(5), 4) == dict.fromkeys(names, 0)
    tables = [nn.Bilinear(2, 2, classes) for classes in (4, 5)]
    assert axes_of_classes(*tables, 4) == {"weight": 0, "bias": 0}
    assert axes_of_classes(nn.Linear(3, 2), nn.Linear(3, 2), 4) == {}


def test_a_network_whose_hidden_layers_grow_with_the_classes_is_refused():
    wide = [nn.Sequential(nn.Linear(3, 2 * classes), nn.Linear(2 * classes, classes)) for classes in (4, 5)]
    with pytest.raises(ConfigError, match=r"0.weight has shape \(8, 3\) for 4 classes.*expected a row for each class"):
        axes_of_classes(*wide, 4)
