"""Flower: FedAvg of its message API in its simulation engine, whose clients are Ray actors of one CPU each.

The app is the one of its PyTorch quickstart. Rounds follow one another inside `Strategy.start`, so the strategy is
where turns are waited for: before it configures a round, and after it has aggregated one. Flower draws the clients
itself, as it does for its users; all hold equally many examples.
"""

from collections.abc import Iterable
from contextlib import suppress

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from nets import first_net, parameter_count
from workloads import chosen_workload

from contestants._flower_client import app as client_app
from contestants._turns import Turns, parser

MANY_ROUNDS = 10**6


class NoMoreTurns(Exception):
    """Ends the simulation, which knows no other way to stop between rounds."""


class TurnTaking(FedAvg):
    """FedAvg that waits for the referee before every round but the first, and says how long a round was.

    Args:
        turns: the line to the referee.
        parameters: trained numbers of the net.
        settings: of FedAvg.
    """

    def __init__(self, turns: Turns, parameters: int, **settings: float) -> None:
        super().__init__(**settings)
        self._turns = turns
        self._parameters = parameters

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's own, once it is our turn."""
        if server_round > 1 and not self._turns.wait():
            raise NoMoreTurns
        self._turns.start_clock()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Flower's own; then the round is over."""
        replies = list(replies)
        aggregated = super().aggregate_train(server_round, replies)
        seconds = self._turns.stop_clock()
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed:
            raise RuntimeError(failed[0])
        if server_round == 1:
            self._turns.ready(self._parameters, seconds)
        else:
            self._turns.report(seconds, sum(int(reply.content["metrics"]["steps"]) for reply in replies))
        return aggregated


def main() -> None:
    """Take turns."""
    arguments = parser(__doc__)
    arguments.add_argument("--workers", type=int, default=2, help="actors")
    options = arguments.parse_args()
    turns, workload = Turns("flwr", "ray", "torch"), chosen_workload(options.workload, options.smoke)
    net = first_net(workload.nets[0], workload.shape, workload.classes, workload.seed)
    strategy = TurnTaking(
        turns,
        parameter_count(net),
        fraction_train=workload.cohort / workload.clients,
        fraction_evaluate=0.0,
        min_train_nodes=workload.cohort,
        min_available_nodes=workload.clients,
    )
    server_app = ServerApp()

    @server_app.main()
    def play(grid: Grid, context: Context) -> None:
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(net.state_dict()),
            num_rounds=MANY_ROUNDS,
            train_config=ConfigRecord({"workload": options.workload, "smoke": options.smoke}),
        )

    with suppress(NoMoreTurns):
        run_simulation(
            server_app,
            client_app,
            num_supernodes=workload.clients,
            backend_config={
                "init_args": {"num_cpus": options.workers},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )


if __name__ == "__main__":
    main()
