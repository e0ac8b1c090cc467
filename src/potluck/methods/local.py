"""Local: every client trains alone.

The baseline of all comparisons: what a client has without the federation. Nothing is sent in either direction. A
client trains when it is drawn, as it would with any other method, and goes on from where it stopped the last time.

Symbols
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      nothing
    up        nothing

Limits
    training.lr=0.0 stays at rest
    training.batch_size=1000 approaches fedmd digestion.lr=0.0 pretrain=false training.batch_size=1000

Departures from the paper
    None: there is no paper.
"""

from dataclasses import dataclass

from potluck import fl


@dataclass(frozen=True)
class Local(fl.Stateless):
    """Hyper-parameters of local training.

    Attributes:
        training: a client's local training.
    """

    family = "alone"
    unguarded = "exchanges nothing"
    aligns_classes = True
    revises = ()

    variants = {
        "lasting optimisers": {"training.persist": True},
    }

    builds_clients_models = False
    needs_networks = False
    training: fl.LocalTraining = fl.LocalTraining()

    def round(self, state: fl.Nothing, cohort: fl.Cohort, server: fl.Server) -> fl.Nothing:
        cohort.ask(self.local_update, fl.Message())
        return state

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        return fl.Schema()

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return fl.Message()
