"""pfl: its FederatedAveraging with its simulated backend and PyTorch, in one process or, by torchrun, in several.

    python -m torch.distributed.run --nproc-per-node 2 -m contestants.pfl --workload mlp

Rounds follow one another inside `FederatedAveraging.run`, so a callback, which pfl calls at the end of each, is where
turns are waited for.
"""

from collections.abc import Iterator

import torch
from nets import first_net, parameter_count
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import distributed
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from workloads import Workload, chosen_workload, draw_data

from contestants._turns import Turns, parser

MANY_ROUNDS = 10**9


class Task(nn.Module):
    """A net with the two methods that pfl asks of a model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.criterion = nn.CrossEntropyLoss()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """What a training step minimises."""
        self.train()
        return self.criterion(self.net(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
        """What an evaluation reports; pfl evaluates in its first iteration, which is not measured."""
        self.eval()
        return {"loss": Weighted.from_unweighted(self.criterion(self.net(inputs), targets).item())}


class TurnTaking(TrainingProcessCallback):
    """Says after every round how long it was, and waits for the next turn.

    Args:
        turns: the line to the referee; None in processes that only help.
        parameters: trained numbers of the net.
    """

    def __init__(self, turns: Turns | None, parameters: int) -> None:
        self._turns = turns
        self._parameters = parameters
        self._steps = 0
        register_optimizer_step_post_hook(self._count)

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """The first round begins."""
        if self._turns:
            self._turns.start_clock()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round is over; whether it was the last."""
        seconds = self._turns.stop_clock() if self._turns else 0.0
        steps = int(agreed(float(self._steps)))
        self._steps = 0
        if self._turns and central_iteration == 0:
            self._turns.ready(self._parameters, seconds, processes=distributed.world_size)
        elif self._turns:
            self._turns.report(seconds, steps)
        goes_on = agreed(float(self._turns.wait()) if self._turns else 0.0) > 0
        if self._turns:
            self._turns.start_clock()
        return not goes_on, Metrics()

    def _count(self, optimizer: Optimizer, *arguments: object) -> None:
        self._steps += isinstance(optimizer, Adam)  # the server's is no Adam


def agreed(number: float) -> float:
    """The sum over the processes, known to all of them."""
    (total,) = distributed.all_reduce([torch.tensor([number])])
    return float(total)


def members(workload: Workload) -> Iterator[int]:
    """The clients of the first round, then those of the second, and so on."""
    number = 1
    while True:
        yield from workload.members(number)
        number += 1


def federated_dataset(workload: Workload) -> FederatedDataset:
    """The workload's clients, drawn in its order."""
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in draw_data(workload)]
    clients = members(workload)
    return FederatedDataset(lambda client: PyTorchTensorDataset(data[client], user_id=str(client)), clients.__next__)


def model_of(workload: Workload) -> PyTorchModel:
    """The first model; clients train with Adam, and the server takes their mean change as it is."""
    net = Task(first_net(workload.nets[0], workload.shape, workload.classes, workload.seed))
    return PyTorchModel(net, local_optimizer_create=Adam, central_optimizer=SGD(net.parameters(), lr=1.0))


def main() -> None:
    """Take turns."""
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    turns = Turns("pfl", "torch") if distributed.global_rank == 0 else None
    workload = chosen_workload(options.workload, options.smoke)
    data, model = federated_dataset(workload), model_of(workload)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=MANY_ROUNDS,
            evaluation_frequency=MANY_ROUNDS,
            train_cohort_size=workload.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=workload.epochs,
            local_learning_rate=workload.lr,
            local_batch_size=workload.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=workload.batch_size),
        callbacks=[TurnTaking(turns, parameter_count(model.pytorch_model))],
    )


if __name__ == "__main__":
    main()
