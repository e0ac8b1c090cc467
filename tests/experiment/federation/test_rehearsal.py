import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.requests.examples import Examples
from potluck.experiment.federation.rehearsal import rehearse
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method
from potluck.testing.worlds import CLASSES, World, quick, toy_federation

FEDERATION = toy_federation(World(batchnorm=True))


class Net(nn.Module):
    """A layer, and what is done to its outputs."""

    def __init__(self, after: Callable[["Net", Tensor], object], outputs: int = CLASSES) -> None:
        super().__init__()
        self.layer = nn.Linear(10, outputs)
        self.after = after

    def forward(self, x: Tensor) -> object:
        return self.after(self, self.layer(x))


class ModelOutput(dict[str, Tensor]):
    """As Hugging Face's: a mapping whose entries are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        if name in self:
            return self[name]
        raise AttributeError(name)


def frozen() -> nn.Module:
    return Net(lambda net, y: y).requires_grad_(False)


def deep() -> nn.Module:
    """Finite outputs whose gradient is not: the root of 0."""
    return Net(lambda net, y: y - (y - y).sqrt())


class Looked(nn.Module):
    """Reads its inputs as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(4, CLASSES, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.long().clamp(0, 3))


def late() -> nn.Module:
    """Its second layer is made when it is first called."""

    def grown(net: Net, y: Tensor) -> Tensor:
        if not hasattr(net, "more"):
            net.more = nn.Linear(CLASSES, CLASSES)
        return net.more(y)

    return Net(grown)


def complex_net() -> nn.Module:
    net = Net(lambda net, y: y * net.factor.real)
    net.factor = nn.Parameter(torch.ones(CLASSES, dtype=torch.complex64))
    return net


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Looked, "the gradient of table.weight is sparse; expected a dense one: leave out sparse=True"),
        (late, "its forward makes more.weight, which is not trained or sent; make it in __init__"),
        (complex_net, "factor is complex64; expected real numbers"),
        (
            lambda: Net(lambda net, y: {"scores": y, "hidden": y}),
            "returns dict; expected logits of shape (batch, 4): return the one entry that holds the logits, or call it",
        ),
        (
            lambda: Net(lambda net, y: ModelOutput(scores=y, hidden=y)),
            "returns ModelOutput; expected logits of shape (batch, 4): return the one entry that holds the logits",
        ),
        (lambda: Net(lambda net, y: (y, y)), "returns tuple; expected logits of shape (batch, 4): return the logits"),
        (lambda: Net(lambda net, y: None), "returns NoneType; expected logits"),
        (lambda: Net(lambda net, y: y, 7), "returns a tensor of shape (batch, 7); expected logits of shape (batch, 4)"),
        (lambda: Net(lambda net, y: y.sum(1)), "returns a tensor of shape (batch,); expected logits"),
        (lambda: Net(lambda net, y: y[:1]), "returns a tensor of shape (1, 4); expected logits"),
        (lambda: Net(lambda net, y: y.argmax(1, keepdim=True).expand(-1, 4)), "returns torch.int64; expected logits"),
        (lambda: Net(lambda net, y: y * torch.nan), "returns NaN or infinity in evaluation mode, with its first"),
        (lambda: Net(lambda net, y: y / (not net.training)), "returns NaN or infinity in training mode"),
        (lambda: nn.Linear(11, CLASSES), "cannot read inputs of shape (batch, 10) in evaluation mode: RuntimeError: "),
        (frozen, "the loss depends on no parameter that can be trained; expected one with requires_grad"),
        (deep, "the gradient of layer.weight is NaN or infinite"),
    ],
)
@pytest.mark.parametrize("whose", ["a client's", "the server's"])
def test_a_model_that_cannot_be_trained_is_told_before_the_first_round(tmp_path, make, expected, whose):
    name = "toy2" if whose == "a client's" else "global"
    architectures = {**FEDERATION.architectures, name: make}
    federation = dataclasses.replace(FEDERATION, architectures=architectures)
    if whose == "the server's":
        federation = dataclasses.replace(federation, server_architecture="global")
        if make in (frozen, deep, Looked):
            return rehearse(federation)  # nobody trains it on these examples
    with pytest.raises(ConfigError) as caught:
        Run(get_method("local")(), federation, RunConfig(tolerate_failures=True), tmp_path / "run")
    assert str(caught.value).startswith(f"model {name}: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    return None


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, CLASSES))


@pytest.mark.usefixtures("global_generator_unchanged")
def test_rehearse_changes_nothing_of_a_run(monkeypatch, tmp_path):
    """Not a bit, with networks that draw and keep statistics."""
    federation = dataclasses.replace(FEDERATION, architectures=dict.fromkeys(FEDERATION.architectures, dropout_net))

    def played(name):
        config = RunConfig(rounds=2, executor="sequential")
        return Run(quick(get_method("fedavg")), federation, config, tmp_path / name).run().checkpoint

    rehearsed = played("rehearsed")
    monkeypatch.setattr("potluck.experiment.running.run.rehearse", lambda federation, common_test: None)
    assert played("unrehearsed") == rehearsed


def with_train(train: Examples):
    sites = {id: dataclasses.replace(site, train=train) for id, site in FEDERATION.sites.items()}
    return dataclasses.replace(FEDERATION, sites=sites)


def test_rehearse_takes_a_single_example_twice():
    """Batch normalisation has no statistics of one example, and that is not the network's fault."""
    rehearse(with_train(FEDERATION.sites[0].train.take(torch.tensor([3]))))


def test_rehearse_does_not_blame_a_network_for_its_data():
    train = FEDERATION.sites[0].train
    rehearse(with_train(Examples(torch.full_like(train.inputs, torch.nan), train.targets)))


@pytest.mark.parametrize("targets", [torch.tensor([0, CLASSES]), torch.rand(2)])
def test_rehearse_tells_targets_that_the_loss_does_not_take(targets):
    with pytest.raises(ConfigError, match=r"model toy1: the loss cannot be taken of logits \(batch, 4\) and targets"):
        rehearse(with_train(Examples(torch.rand(2, 10), targets)))


def test_rehearse_leaves_out_clients_whose_data_are_elsewhere():
    elsewhere = with_train(Examples(torch.empty(5, 0), torch.empty(5, 0)))

    def unknown() -> nn.Module:
        raise AssertionError("built")

    nobody = dict.fromkeys(FEDERATION.architectures, unknown)
    rehearse(dataclasses.replace(elsewhere, public=None, test=None, architectures=nobody))
    with pytest.raises(ConfigError, match="model toy1: returns"):
        rehearse(dataclasses.replace(elsewhere, architectures={**nobody, "toy1": lambda: nn.Linear(10, 7)}))
