"""HypeMeFed: multi-exit networks, whose missing layers hypernetworks generate.

Shin, Lee, Lee, Choi, Kim, Ko. SenSys 2024. https://arxiv.org/abs/2407.03086.

There is one global network with an exit behind each of a few depths. A client trains the leading layers up to the
exit that it can afford, and all exits on the way; the last of them predicts. Few clients train the deep layers. So for
each matrix of these the server has a hypernetwork, which learns from the clients that have it how it follows from a
matrix before it, and generates it for the clients that lack it. Then it averages as if everybody had sent it.

Symbols
    W_t, W_s  a matrix that some clients lack, and the one that it is generated from: state.weights[t], sources()[t]
    A, B      factors(), whose product A^T B is a matrix, or the nearest to it of rank r
    r         rank
    H_t       state.hypernetworks[t]: two perceptrons, of which one makes of A the rows, one of B the columns
    E, eta    training.epochs, training.lr; server_training for the hypernetworks

Wire
    down      weights at most |weights|, buffers at most |buffers|
    up        weights at most |weights|, buffers at most |buffers|

Limits
    levels=[1.0] equals fedavg sharing.weighting="uniform" on capacity=1.0
    generate=false equals depthfl alpha=0.0 consistency=0.0 exits="linear" levels=[1.0,0.75,0.5] on capacity=0.5
    equals hypemefed generate=false on capacity=0.5
    training.lr=0.0 generate=false stays at rest

Departures from the paper
    1. Of the paper only the abstract and a public summary were at hand; the rest follows the authors' code, except for
       departures 2 to 6.
    2. In that code hypernetworks learn and generate, but what they generate is lost: it is assigned to the data of a
       temporary tensor, and the average is over the values that the client had been sent. Here it is averaged.
    3. As the rank that code passes the number of the round, so that it has 1 for good; here it is the default of its
       functions, 100, or that of the matrix if it is smaller. Signs, which the decomposition leaves open, are such that
       the largest number of each left vector is positive.
    4. The code generates convolutions' kernels, and those of one part of a VGG from the part before, in order. Here
       every tensor with two axes or more of a block that some level lacks is generated from that of the same name in
       the block as many blocks before as its part has, or as there are before the part; one without a namesake is not.
       Of a kernel the matrix is that of the code, of outputs * height rows.
    5. What is not generated (biases, norms, exits) is the mean over those who trained it; in the code clients that lack
       it count with what they were sent. What nobody of the round has trained stays as it is, and so does what would be
       generated from it; the code draws as many clients of each level and fails without one of the last.
    6. An exit is a norm, a mean over positions and a linear layer; the code's is dropout and a linear layer over all
       positions. A level is a share of the blocks of any network in stages, rounded down, and a client has the largest
       that its capacity allows; the code deals three levels by the client's number.
    7. All exits' losses have the weight 1, as in the code; the summary has weights. The code's loss can also teach the
       exits by the last one, and leaves the weight of that at 0, as here.
    8. A rule of `combine` protects the averages; the hypernetworks learn from every client's matrices, so that against
       a hostile one it protects with `generate=false` alone.
    9. Local training defaults to Adam, like all methods here; the code has Adam with 0.0005, weight decay 0.00005,
       batches of 32 (STL-10) or 128 (SVHN) and 5 epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl
from potluck.methods.depthfl import ExitsLoss


@dataclass(frozen=True)
class State:
    """The whole network with all its exits: weights, BatchNorm statistics; and by matrix its hypernetwork."""

    weights: fl.Weights
    buffers: fl.Weights
    hypernetworks: fl.GroupWeights


@dataclass(frozen=True)
class HypeMeFed(fl.depth.DepthLevels[State]):
    """Hyper-parameters of HypeMeFed, beside those of `DepthLevels`.

    Attributes:
        server_training: of a hypernetwork, on the matrices of one round.
        generate: whether the server generates what a client lacks; else it averages what there is.
        rank: r, the largest.
        hidden: units of a hypernetwork's hidden layers.
        combine: how the clients' values of a number become one.
    """

    variants = {
        "nothing generated": {"generate": False},
        "rank 1": {"rank": 1},
        "median": {"combine.rule": "median"},
    }

    aligns_classes = True
    default_capacities = (1.0, 0.75, 0.5)
    server_training: fl.ServerTraining = fl.LocalTraining("adam", lr=0.0005, epochs=25, batch_size=1)
    levels: tuple[Annotated[float, fl.above(0), fl.at_most(1)], ...] = (1.0, 0.75, 0.5)
    generate: bool = True
    rank: Annotated[int, fl.at_least(1)] = 100
    hidden: Annotated[int, fl.at_least(1)] = 512
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.ONE_OUTPUT}

    def init(self, server: fl.Server) -> State:
        net = self.whole(server)
        return State(fl.parameters_of(net), fl.buffers_of(net), {})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.ask(self.local_update, {i: self.inference_message(state, i, server) for i in cohort.ids})
        models = {i: dict(reply["weights"]) for i, reply in replies.items()}
        hypernetworks = self.completed([*models.values()], state, server) if self.generate else state.hypernetworks
        means = fl.Sharing(weighting="uniform", combine=self.combine).no_means(
            self.roster(server), "weights", "buffers"
        )
        for i, model in models.items():
            means.add(i, fl.Message(weights=model, buffers=replies[i].get("buffers")))
        weights = means.over({"all": state.weights}, "weights")["all"]
        return State(weights, means.over({"all": state.buffers}, "buffers")["all"], hypernetworks)

    def completed(self, models: Sequence[fl.Weights], state: State, server: fl.Server) -> fl.GroupWeights:
        """The hypernetworks, trained on what the models have; and into these goes what they lack."""
        found = dict(state.hypernetworks)
        for target, source in server.about(None, self.sources).items():
            having = [model for model in models if target in model]
            lacking = [model for model in models if target not in model and source in model]
            if not having:
                continue
            W_s, W_t = state.weights[source], state.weights[target]
            build = partial(Hypernetwork, as_matrix(W_s).shape, as_matrix(W_t).shape, self.hidden)
            net = server.module(f"hypernetwork {target}", build)
            fl.load(net, found.get(target, {}), partial=True)
            server.fit(fl.Fit(net, matched, self.lesson(having, source, target), self.server_training))
            found[target] = fl.learnt_of(net)
            if lacking:
                made = server.predict(fl.Predict(net, self.lesson(lacking, source, source)))
                for model, matrix in zip(lacking, made, strict=True):
                    model[target] = matrix.view_as(W_t)
        return found

    def lesson(self, models: Sequence[fl.Weights], source: str, target: str) -> fl.Examples:
        """Of each model, the factors of a matrix, and the matrix that is to follow from them."""
        inputs = [factors(as_matrix(model[source]), self.rank) for model in models]
        return fl.Examples(torch.stack(inputs), torch.stack([as_matrix(model[target]) for model in models]))

    def sources(self, net: nn.Module, input_shape: fl.InputShape) -> dict[str, str]:
        """By the name of each matrix that some level lacks, that of the one which it is generated from."""
        weights = {name: tensor for name, tensor in fl.parameters_of(net).items() if tensor.dim() > 1}
        row = [block for blocks in fl.stages.stages_of(net).rows.values() for block in blocks]
        ends = sorted({fl.exits.blocks_within(net, level) for level in self.levels})
        found = dict[str, str]()
        for end, next_end in pairwise(ends):
            for number in range(end, next_end):
                block, before = row[number], row[number - min(next_end - end, end)]
                pairs = {name: before[own] for own, name in block.items() if own in before}
                found |= {name: pairs[name] for name in weights if pairs.get(name) in weights}
        return found

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        net = self.filled(client, message)
        yield fl.Fit(net, ExitsLoss(client.criterion, 0.0), client.train, self.training)
        return self.reply(net)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        return self.filled(client, message)

    def global_model(self, state: State, server: fl.Server) -> nn.Module | None:
        return fl.load(self.net(server, max(self.levels)), {**state.weights, **state.buffers})


class Hypernetwork(nn.Module):
    """H_t: the factors of a matrix (rows, columns) of one shape to a matrix of another."""

    def __init__(self, source: Sequence[int], target: Sequence[int], hidden: int) -> None:
        super().__init__()
        self.sizes = list(source)
        across = zip(source, reversed(target), strict=True)  # what a layer puts out the next one reads
        self.left, self.right = (
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out)) for width, out in across
        )

    def forward(self, x: Tensor) -> Tensor:
        """Factors (batch, rank, rows + columns), side by side, to matrices (batch, rows, columns)."""
        a, b = x.split(self.sizes, -1)
        return self.right(b).mT @ self.left(a)


def matched(net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
    """How far the matrices that are generated are from those of the clients."""
    return F.mse_loss(net(batch.inputs), batch.targets)


def as_matrix(tensor: Tensor) -> Tensor:
    """A layer's weights as (outputs * height, inputs * width)."""
    return tensor.reshape(-1, tensor.shape[1] * (tensor.shape[-1] if tensor.dim() > 2 else 1))


def factors(matrix: Tensor, rank: int) -> Tensor:
    """A and B side by side, (r, rows + columns): of U S V^T cut to rank r, the rows of sqrt(S) U^T and sqrt(S) V^T."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    largest = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
    pair = torch.cat([(u * largest).mT, v * largest.mT], 1)
    return (s.sqrt()[:, None] * pair)[:rank].contiguous()
