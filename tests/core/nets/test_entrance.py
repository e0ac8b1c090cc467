import copy
import pickle
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from potluck.core.ground.inputs import Form
from potluck.core.nets.entrance import blank_inputs, with_entrance
from potluck.models.contract import StagedNet

SHAPE = {"ids": Form((3,), torch.int64), "mask": Form((3,), torch.int64)}
INPUTS = {"ids": torch.tensor([[1, 2, 3]]), "mask": torch.tensor([[1, 1, 0]])}


class Masked(nn.Module):
    def forward(self, mask, ids):
        return (ids * mask).sum(1, keepdim=True)


class IdsAlone(nn.Module):
    def forward(self, ids, scale=2):
        return ids.sum(1, keepdim=True) * scale


class Anything(nn.Module):
    def forward(self, **inputs):
        return (inputs["ids"] + inputs["mask"]).sum(1, keepdim=True)


class Mapping(nn.Module):
    def forward(self, batch):
        return batch["ids"].sum(1, keepdim=True)


class Other(nn.Module):
    def forward(self, input_ids, attention_mask):
        return input_ids * attention_mask


@pytest.mark.parametrize(("net", "expected"), [(Masked(), 3), (IdsAlone(), 12), (Anything(), 8), (Mapping(), 6)])
def test_named_inputs_go_to_the_arguments_of_their_names(net, expected):
    assert with_entrance(net, SHAPE)(INPUTS).tolist() == [[expected]]


def test_a_single_named_input_is_given_as_it_is_to_a_forward_with_another_name_for_it():
    linear = with_entrance(nn.Linear(2, 1), {"age": Form((2,), torch.float32)})
    x = torch.randn(4, 2)
    assert torch.equal(linear({"age": x}), linear(x))


def test_an_argument_without_an_input_is_refused_with_the_names_that_there_are():
    with pytest.raises(TypeError, match="an argument input_ids; the inputs are called ids, mask: call one alike"):
        with_entrance(Other(), SHAPE)(INPUTS)


def test_the_first_stage_of_a_staged_net_is_given_named_inputs_by_name_whoever_calls_it():
    net = with_entrance(StagedNet({"read": Masked(), "next": nn.Identity()}, nn.Linear(1, 1)), SHAPE)
    inputs = {"ids": torch.ones(2, 3), "mask": torch.ones(2, 3)}
    assert torch.equal(net(inputs), net.head(net.stages(inputs)))


class Returns(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x + 1)


Aux = namedtuple("Aux", "logits aux")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: {"logits": y, "hidden": y * 2},
        lambda y: {"scores": y},
        lambda y: SimpleNamespace(logits=y, loss=None),
        lambda y: Aux(y, y * 3),
        lambda y: (y,),
    ],
)
def test_of_several_outputs_there_remain_the_logits(wrap):
    x = torch.zeros(2, 3)
    assert torch.equal(with_entrance(Returns(wrap), (3,))(x), x + 1)


@pytest.mark.parametrize("wrap", [lambda y: (y, y), lambda y: {"a": y, "b": y}])
def test_outputs_of_which_none_is_the_logits_stay_as_they_are_and_are_refused_when_rehearsed(wrap):
    assert not isinstance(with_entrance(Returns(wrap), (3,))(torch.zeros(2, 3)), torch.Tensor)


def test_a_net_keeps_its_tensors_names_and_its_copies_can_be_called_alike():
    net = with_entrance(nn.Sequential(Masked(), nn.Linear(1, 2)), {})
    assert list(net.state_dict()) == ["1.weight", "1.bias"]
    twice = with_entrance(with_entrance(Masked(), SHAPE), SHAPE)
    assert (len(twice._forward_pre_hooks), len(twice._forward_hooks)) == (1, 1)
    for other in (copy.deepcopy(twice), pickle.loads(pickle.dumps(twice))):
        assert other(INPUTS).tolist() == [[3]]


def test_blank_inputs__are_tokens_for_a_net_that_embeds_unless_their_names_say_what_they_are():
    assert blank_inputs(nn.Embedding(3, 2), (5,), 2).dtype == torch.int64
    assert blank_inputs(nn.Linear(5, 2), (5,), 2).dtype == torch.float32
    named = blank_inputs(nn.Embedding(3, 2), {"age": Form((5,), torch.float32)}, 2)
    assert (named["age"].shape, named["age"].dtype) == ((2, 5), torch.float32)
