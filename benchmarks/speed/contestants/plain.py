"""No framework: what one writes in an afternoon, a loop over clients and a loop over the keys of their state dicts.

Clients of several architectures are averaged layer by layer, over those who have the layer.
"""

import copy

import torch
from nets import first_net, parameter_count
from torch import Tensor
from torch.utils.data import DataLoader
from workloads import chosen_workload

from contestants._training import datasets, train
from contestants._turns import Turns, parser, play

StateDict = dict[str, Tensor]


def average(replies: list[tuple[StateDict, int]]) -> StateDict:
    """By key, the mean over the clients that have it, weighted by their examples."""
    mean: StateDict = {}
    for key in dict.fromkeys(key for state, _ in replies for key in state):
        owners = [(state[key], examples) for state, examples in replies if key in state]
        total = sum(examples for _, examples in owners)
        mean[key] = sum(tensor * (examples / total) for tensor, examples in owners)
    return mean


def main() -> None:
    """Take turns."""
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    turns, workload = Turns("torch"), chosen_workload(options.workload, options.smoke)
    clients = datasets(workload)
    nets = {name: first_net(name, workload.shape, workload.classes, workload.seed) for name in workload.nets}
    weights: StateDict = {key: tensor for net in nets.values() for key, tensor in net.state_dict().items()}

    def play_round(number: int) -> int:
        steps, replies = 0, []
        for client in workload.members(number):
            net = copy.deepcopy(nets[workload.net_of(client)])
            net.load_state_dict({key: weights[key] for key in net.state_dict()})
            steps += train(net, DataLoader(clients[client], workload.batch_size, shuffle=True), workload)
            replies.append((net.state_dict(), len(clients[client])))
        weights.update(average(replies))
        return steps

    play(turns, play_round, sum(parameter_count(net) for net in nets.values()))


if __name__ == "__main__":
    main()
