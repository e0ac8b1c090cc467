"""FedLab: the serial trainer of its FedAvg, with Adam in place of SGD, and that server, in one process.

A round is the body of the loop in `fedlab.core.standalone.StandalonePipeline`, whose evaluation after every round has
no place here.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

import torch
from nets import first_net, parameter_count
from torch import Tensor, nn
from torch.utils.data import DataLoader
from workloads import Workload, chosen_workload

from contestants._training import datasets, train
from contestants._turns import Turns, parser, play

if find_spec("torchvision") is None:
    # FedLab imports it for data sets that are not used here, and wheels for a torch with CUDA do not load beside one
    # without.
    sys.modules["torchvision"] = ModuleType("torchvision")
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"] = ModuleType("torchvision.transforms")

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset


class Clients(FedDataset):
    """The workload's clients."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.num = workload.clients
        self._examples = datasets(workload)

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        """A client's batches, shuffled."""
        return DataLoader(self._examples[id], batch_size, shuffle=True)


class AdamSerialTrainer(FedAvgSerialClientTrainer):
    """The serial trainer with the training pipeline replaced, as its documentation has it.

    Args:
        net: the model.
        workload: what is played.
    """

    def __init__(self, net: nn.Module, workload: Workload) -> None:
        super().__init__(net, workload.clients)
        self._workload = workload
        self.steps = 0
        self.setup_dataset(Clients(workload))
        self.setup_optim(workload.epochs, workload.batch_size, workload.lr)

    def train(self, model_parameters: Tensor, train_loader: DataLoader) -> list[Tensor]:
        """Train from the server's parameters, and return what they have become."""
        self.set_model(model_parameters)
        self.steps += train(self.model, train_loader, self._workload)
        return [self.model_parameters]


def main() -> None:
    """Take turns."""
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    turns, workload = Turns("fedlab", "torch"), chosen_workload(options.workload, options.smoke)
    net = first_net(workload.nets[0], workload.shape, workload.classes, workload.seed)
    trainer = AdamSerialTrainer(net, workload)
    handler = FedAvgServerHandler(net, sys.maxsize, workload.cohort / workload.clients)
    handler.num_clients = trainer.num_clients

    def play_round(number: int) -> int:
        before = trainer.steps
        trainer.local_process(handler.downlink_package, workload.members(number))
        for upload in trainer.uplink_package:
            handler.load(upload)
        return trainer.steps - before

    play(turns, play_round, parameter_count(net))


if __name__ == "__main__":
    main()
