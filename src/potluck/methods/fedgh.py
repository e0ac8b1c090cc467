"""FedGH: a generalised global header.

Yi, Wang, Liu, Shi, Yu. ACM MM 2023. https://arxiv.org/abs/2303.13137.

Clients of any architecture report, for each class they hold, the mean of the features that their heads read. The server
trains one head, the header, to recognise the classes of all these means, and clients replace their heads by it.

A class with one example has that example's features for a mean, and the server sees them.

Symbols
    theta     state.head, the header
    R_k^s     a row of reply["prototypes"], the mean of client k's features of its examples of class s
    eta_theta server_training.lr

Wire
    down      head |head|
    up        counts classes * integer, prototypes present * |h|

Limits
    clients_adopt=false equals local
    server_training.lr=0.0 training.lr=0.0 stays at rest

Departures from the paper
    1. In the authors' two scripts the server steps an optimiser of a client's network, which does not hold the header,
       so it keeps its initial weights. Here it is trained as in the paper: SGD, a step for each mean. HtFLlib trains it
       too, in batches of 10.
    2. The means come in random order, in the paper by client and class.
    3. They are measured with the trained network in evaluation mode, over all examples of a class; the authors' code
       takes the mean of the means of batches.
    4. Clients begin the first round with the server's head, so that all headers descend from one.
    5. Evaluated is a client's network with the newest header, which is what the next round starts from; the authors'
       scripts evaluate it before the header is replaced. `clients_adopt=false` never replaces it.
    6. Heads with BatchNorm are refused, since means of classes have other statistics than examples.
    7. Local training defaults to Adam, like all methods here; the authors' scripts have SGD with 0.01, and batches of
       64 and 10 epochs, or of 512 and 30.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl


@dataclass(frozen=True)
class State:
    """theta, the header."""

    head: fl.Weights


@dataclass(frozen=True)
class FedGH(fl.Method[State]):
    """Hyper-parameters of FedGH.

    Attributes:
        training: a client's local training.
        server_training: of the header, on what clients reported in a round.
        clients_adopt: whether clients replace their heads by the header; else they train alone.
    """

    family = "classes"
    unguarded = "the server's head learns from every client's means of classes"
    aligns_classes = True
    revises = ()

    variants = {"own heads": {"clients_adopt": False}}

    training: fl.LocalTraining = fl.LocalTraining()
    server_training: fl.ServerTraining = fl.LocalTraining("sgd", lr=0.01, batch_size=1)
    clients_adopt: bool = True

    def needs(self) -> frozenset[fl.Need]:
        heads = {fl.heads.WHOLE_HEAD, fl.heads.COMMON_HEAD, fl.heads.PLAIN_HEAD, fl.heads.TRAINED_HEAD}
        return frozenset({fl.Need.SPLIT_MODEL, fl.Need.CLASSES} | heads)

    def init(self, server: fl.Server) -> State:
        return State(fl.learnt_of(_new_head(server)))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        rows = fl.prototypes.reported(cohort.ask(self.local_update, self.headers(state, cohort.ids, server)))
        return self.taught(state, rows["values"], F.one_hot(rows["labels"], server.num_classes), server)

    def taught(self, state: State, features: Tensor, shares: Tensor, server: fl.Server) -> State:
        """The header after training on features (n, width), each of classes by these shares (n, classes)."""
        head = fl.load(_new_head(server), state.head)
        data = fl.Examples(features, shares.to(features))
        server.fit(fl.Fit(head, HeadLoss(), data, self.server_training))
        return State(fl.learnt_of(head))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        return fl.prototypes.expected_prototypes(server, member)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        yield fl.Fit(with_header(client, message), client.objective, client.train, self.training)
        return fl.Message(**(yield from fl.prototypes.measured(client)))

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        return self.headers(state, [client_id], server)[client_id]

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        return with_header(client, message)

    def headers(self, state: State, ids: Sequence[fl.ClientId], server: fl.Server) -> dict[fl.ClientId, fl.Message]:
        """What clients are sent: the header, or of it their own classes' rows, or nothing."""
        whole = fl.Message(head=state.head if self.clients_adopt else None)
        unlike = [member for member in server.members(ids) if member.head is not None and self.clients_adopt]
        own = {member.id: fl.Message(head=fl.heads.head_for(state.head, member, server)) for member in unlike}
        return {id: own.get(id, whole) for id in ids}


@dataclass(frozen=True)
class HeadLoss:
    """The cross-entropy to shares of classes, which are the batch's targets (batch, classes); mean over the batch."""

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of features."""
        return fl.losses.soft_cross_entropy(net(batch.inputs), batch.targets)


def _new_head(server: fl.Server) -> nn.Module:
    """A head like the clients', with the run's initial weights."""
    return fl.split(fl.heads.client_net(server)).head


def with_header(client: fl.Client, message: fl.Message) -> nn.Module:
    """The client's network, its head replaced by the header, if it was sent one."""
    if "head" in message:
        fl.load(fl.split(client.model).head, message["head"])
    return client.model
