"""FedRep: a shared representation, and a head of each client's own that learns first.

Collins, Hassani, Mokhtari, Shakkottai. ICML 2021. https://arxiv.org/abs/2102.07078. Algorithm 1.

In each round a client first fits its head to the representation that it was sent, and then takes a step or more on the
representation under that head. Representations are averaged; heads stay.

Symbols
    phi       state.weights, all layers before the head
    h_i       the head of client.model, kept by the client
    tau       head.epochs, head.batch_size: the head's updates
    alpha     training.lr, and head.lr

Wire
    down      weights at most |w|, buffers at most |b|
    up        weights at most |w|, buffers at most |b|, examples 1

Limits
    training.lr=0.0 head.lr=0.0 stays at rest
    sharing.scope="layer" equals fedrep sharing.scope="architecture" on architectures=1

Departures from the paper
    1. Layers owned by some clients only are averaged over those, see `sharing`.
    2. The head learns for ten epochs and the representation for one, each with an optimiser of its own, as in most of
       the paper's experiments; Algorithm 1 has tau gradient steps and one.
    3. Clients weigh alike, as in Algorithm 1; the authors' code weighs them by their examples,
       `sharing.weighting="samples"`.
    4. In the first phase BatchNorm below the head is in training mode, so its running statistics move; they are
       averaged with the layers that they belong to. The paper does not mention them.
    5. A client's model is its head on the current average. The paper lets all clients train their heads once more at
       the end.
    6. Local training defaults to Adam, like all methods here; the paper has SGD with momentum of 0.5 and 0.01.
"""

from dataclasses import dataclass

from torch import nn

from potluck import fl


@dataclass(frozen=True)
class FedRep(fl.personal.KeepsLayers):
    """Hyper-parameters of FedRep.

    Attributes:
        training: a client's local training of the representation.
        head: of its head, before.
        sharing: who averages with whom, with which weights.
    """

    aligns_classes = True

    variants = {"by samples": {"sharing.weighting": "samples"}, "lasting optimisers": {"head.persist": True}}

    head: fl.LocalTraining = fl.LocalTraining(epochs=10)
    sharing: fl.Sharing = fl.Sharing(weighting="uniform")

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.SPLIT_MODEL}

    def own(self, net: nn.Module) -> frozenset[str]:
        return fl.split(net).last_names()

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        net, loss, phi = client.model, client.objective, message["weights"]
        head = tuple(name for name in fl.parameters_of(net) if name not in phi)
        yield fl.Fit(net, loss, client.train, self.head, trainable=head, name="head")  # Alg. 1, tau updates of h_i
        yield fl.Fit(net, loss, client.train, self.training, trainable=tuple(phi), name="body")  # then of phi
        return self.reply(client, message)
