"""FedBABU: the body is learnt together under a head that never learns; clients adapt it afterwards.

Oh, Kim, Yun. ICLR 2022. https://arxiv.org/abs/2106.06042. Algorithm 1.

All clients have one random head, which stays as it was drawn, and train and average only the body before it. For its
own use a client fine-tunes the model, body and head or the head alone, on its data.

Symbols
    theta_ext state.weights, all layers before the head
    theta_cls the head, as it was drawn
    n_k       len(client.train)
    tau       training.epochs
    tau_f     tuning_epochs

Wire
    down      weights |w|, buffers |b|
    up        weights at most |w|, buffers |b|, examples 1

Limits
    training.lr=0.0 tuning_epochs=0 stays at rest
    tuning_epochs=0 averages each layer over its owners
    sharing.scope="layer" equals fedbabu sharing.scope="architecture" on architectures=1

Departures from the paper
    1. The head goes down with the body, since a client of another architecture, or a new one, lacks it.
    2. Where clients' architectures differ, all that have a head of one shape have the same head; layers owned by some
       clients only are averaged over those, see `sharing`.
    3. A client is fine-tuned where it is evaluated, by plain gradient descent without augmentation, in which
       BatchNorm's running statistics do not change; nothing of it is kept, and before the first round there is none.
    4. Local training defaults to Adam, like all methods here; the paper has SGD with momentum of 0.9 and 0.1, and
       fine-tunes for five epochs with batches of 50.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import nn

from potluck import fl


@dataclass(frozen=True)
class FedBABU(fl.Averages):
    """Hyper-parameters of FedBABU, beside those of `Averages`.

    Attributes:
        tuned: what a client fine-tunes.
        tuning_epochs: tau_f, passes over its data; with 0 it predicts with the body and the random head.
        tuning_lr: learning rate of fine-tuning.
        tuning_batch: examples in a step of it.
    """

    aligns_classes = True

    variants = {"head": {"tuned": "head"}, "not tuned": {"tuning_epochs": 0}}

    tuned: Literal["all", "head"] = "all"
    tuning_epochs: Annotated[int, fl.at_least(0)] = 5
    tuning_lr: Annotated[float, fl.at_least(0)] = 0.01
    tuning_batch: Annotated[int, fl.at_least(2)] = 50
    sharing: fl.Averaging = fl.Sharing()

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.SPLIT_MODEL, fl.heads.TRAINED_BODY}

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        head = server.about(member.architecture, head_names)
        body = {name: tensor for name, tensor in message["weights"].items() if name not in head}
        return fl.Schema(**{**self.sharing.expected(member, message), "weights": fl.schema.like(body)})

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        net, head = client.model, fl.split(client.model).last_names()
        body = tuple(name for name in fl.parameters_of(net) if name not in head)
        yield fl.Fit(net, client.objective, client.train, self.training, trainable=body)
        trained = fl.parameters_of(net)
        return self.sharing.reply(client, weights={name: trained[name] for name in body})

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> Generator[fl.Request, Any, nn.Module]:
        net, epochs = self.sharing.deploy(client, message), self.tuning_epochs if client.round else 0
        names = None if self.tuned == "all" else fl.split(net).last_names()
        return (yield from fl.adapting.adapted(client, client.train, self.tuning_lr, epochs, self.tuning_batch, names))

    def global_model(self, state: fl.sharing.Averaged, server: fl.Server) -> nn.Module | None:
        return None if self.tuning_epochs else super().global_model(state, server)


def head_names(net: nn.Module, input_shape: fl.InputShape) -> frozenset[str]:
    """The names of the head's tensors."""
    return fl.split(net).last_names()
