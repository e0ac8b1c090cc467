"""FedRE: representation entanglement.

Yao, Wang, Wu, Song, Chen, Wang, Tian, Chen, Li, Li. CVPR 2026. https://arxiv.org/abs/2511.22265.

FedGH whose clients report a single vector: a mixture of the mean features of their classes, by random weights that are
drawn anew in every round, and the same mixture of the classes. So less is sent, and no class's mean can be read off
unless the client has a single class; and the server's head is trained on soft labels, against overconfidence.

The vector of a client with one class, and one example of it, is that example's features, and the server sees them.

Symbols
    mu_c      the mean of what the head reads over a client's examples of class c
    w         normalised weights of the client's classes, w_c = u_c / sum u, u uniform on [0, 1]
    r, y      reply["representation"] = sum w_c mu_c and reply["shares"] = sum w_c e_c, e_c the unit vector of class c
    theta     state.head

Wire
    down      head |head|
    up        representation |h|, shares |z|

Limits
    equals fedgh on labels=1
    clients_adopt=false equals local
    server_training.lr=0.0 training.lr=0.0 stays at rest

Departures from the paper
    1. Clients replace their heads by the server's before they train, and are evaluated with it. The released code as
       of May 2026 trains the server's head and never sends it: `clients_adopt=false`.
    2. The server takes a step of SGD for each client, `server_training.batch_size=1`; where a batch has more, its loss
       is their mean, in the released code their sum.
    3. Heads with BatchNorm are refused, as in FedGH.
    4. Local training defaults to Adam, like all methods here.
"""

from dataclasses import dataclass

import torch

from potluck import fl
from potluck.methods.fedgh import FedGH, State, with_header


@dataclass(frozen=True)
class FedRE(FedGH):
    """Hyper-parameters of FedRE.

    Attributes:
        training: a client's local training.
        server_training: of the head, on what clients reported in a round.
        clients_adopt: whether clients replace their heads by the server's; else they train alone.
    """

    unguarded = "the server's head learns from every client's mixture"
    aligns_classes = True

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.ask(self.local_update, self.headers(state, cohort.ids, server))
        r, y = (torch.cat(replies.entries(name)) for name in ("representation", "shares"))
        return self.taught(state, r, y, server)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        shape = fl.features.feature_shape(server, member.architecture, "s_out")
        return fl.Schema(
            representation=fl.schema.floats(1, *shape), shares=fl.schema.Probabilities(1, server.num_classes)
        )

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        yield fl.Fit(with_header(client, message), client.objective, client.train, self.training)
        found = yield from fl.prototypes.measured(client)
        present = found["counts"].nonzero().flatten()
        w = (1 - torch.rand(len(present), generator=client.rng)).to(found["prototypes"])  # above 0
        w = w / w.sum()
        y = w.new_zeros(client.num_classes).index_put((present,), w)
        return fl.Message(representation=(w @ found["prototypes"])[None], shares=y[None])
