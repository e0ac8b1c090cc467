"""FedJAX: its federated averaging with its Haiku models on JAX's CPU backend.

Nets with BatchNorm are not played: FedJAX's models have parameters and no state.
"""

import os

import haiku as hk
import jax
import numpy as np
from workloads import Workload, chosen_workload, draw_data

from contestants._turns import Turns, parser, play

if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree_util.tree_map  # FedJAX 0.0.17 calls it by a name that JAX has dropped

import fedjax


def mlp(classes: int) -> hk.Sequential:
    """The same layers as `nets.mlp`."""
    hidden = [hk.Linear(200), jax.nn.relu, hk.Linear(200), jax.nn.relu]
    return hk.Sequential([hk.Flatten(), *hidden, hk.Linear(classes)])


def cnn(classes: int) -> hk.Sequential:
    """The same layers as `nets.cnn`, with the channels last, as JAX has them."""
    return hk.Sequential(
        [
            hk.Conv2D(32, 3, padding="VALID"),
            jax.nn.relu,
            hk.Conv2D(64, 3, padding="VALID"),
            jax.nn.relu,
            hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), padding="VALID"),
            hk.Flatten(),
            hk.Linear(128),
            jax.nn.relu,
            hk.Linear(classes),
        ]
    )


NETS = {"mlp": mlp, "cnn": cnn}


def federated_data(workload: Workload) -> fedjax.FederatedData:
    """The workload's clients in memory, with the channels last."""
    return fedjax.InMemoryFederatedData(
        {
            client: {"x": np.ascontiguousarray(np.moveaxis(inputs, 1, -1)), "y": targets.astype(np.int32)}
            for client, (inputs, targets) in enumerate(draw_data(workload))
        }
    )


def model_of(workload: Workload) -> fedjax.Model:
    """The workload's net with its loss."""
    channels, height, width = workload.shape
    sample = {"x": np.zeros((1, height, width, channels), np.float32), "y": np.zeros(1, np.int32)}
    return fedjax.create_model_from_haiku(
        hk.transform(lambda batch: NETS[workload.nets[0]](workload.classes)(batch["x"])),
        sample,
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
    )


def set_up_xla(threads: int, backend: str) -> None:
    """One thread, as many as XLA wants, or one device a thread; before JAX has computed anything."""
    flags = []
    if threads == 1 or backend == "pmap":
        flags.append("--xla_cpu_multi_thread_eigen=false")
    if threads == 1:
        os.environ["NPROC"] = "1"
    if backend == "pmap":
        flags.append(f"--xla_force_host_platform_device_count={threads}")
    os.environ["XLA_FLAGS"] = " ".join(flags)


def main() -> None:
    """Take turns."""
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--backend", choices=("jit", "pmap"), default="jit", help="one client at a time, or several")
    options = arguments.parse_args()
    set_up_xla(options.threads, options.backend)
    turns, workload = Turns("fedjax", "jax", "dm-haiku"), chosen_workload(options.workload, options.smoke)
    clients, model = federated_data(workload), model_of(workload)
    fedjax.set_for_each_client_backend(options.backend)
    batching = fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch_size, num_epochs=workload.epochs)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.adam(workload.lr),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=batching,
    )
    steps = {client: sum(1 for _ in data.shuffle_repeat_batch(batching)) for client, data in clients.clients()}
    rng, first = jax.random.split(jax.random.PRNGKey(workload.seed))
    state = algorithm.init(model.init(first))

    def play_round(number: int) -> int:
        nonlocal rng, state
        rng, *client_rngs = jax.random.split(rng, workload.cohort + 1)
        chosen = list(clients.get_clients(workload.members(number)))
        members = [(client, data, key) for (client, data), key in zip(chosen, client_rngs, strict=True)]
        state, _ = algorithm.apply(state, members)
        jax.block_until_ready(state.params)
        return sum(steps[client] for client, _ in chosen)

    play(turns, play_round, sum(leaf.size for leaf in jax.tree_util.tree_leaves(state.params)))


if __name__ == "__main__":
    main()
