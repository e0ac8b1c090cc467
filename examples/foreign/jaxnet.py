"""A network in JAX as a client, with its own stochastic gradient descent.

    python examples/foreign/jaxnet.py HOST:PORT --keys ... --data ... --public ...

Other than trees it goes on from its weights at every lesson. It learns soft labels as they are: its loss is the
cross-entropy to them, each example by its weight.
"""

import jax
import jax.numpy as jnp
import node
import numpy as np

HIDDEN, EPOCHS, BATCH, RATE, MOMENTUM = 64, 10, 32, 0.05, 0.9


def logits(weights, x):
    """Of flattened inputs (n, ...)."""
    hidden = jax.nn.relu(x @ weights["in"] + weights["in_bias"])
    return hidden @ weights["out"] + weights["out_bias"]


def loss(weights, x, targets, weight):
    """The mean cross-entropy, by weights."""
    return -(weight * (targets * jax.nn.log_softmax(logits(weights, x))).sum(1)).mean()


@jax.jit
def step(weights, speed, x, targets, weight):
    """One step of stochastic gradient descent with momentum."""
    slope = jax.grad(loss)(weights, x, targets, weight)
    speed = jax.tree.map(lambda old, new: MOMENTUM * old + new, speed, slope)
    return jax.tree.map(lambda old, new: old - RATE * new, weights, speed), speed


class Net:
    """Two layers; the weights are numpy's between lessons."""

    def __init__(self, classes):
        self.classes, self.weights = classes, None
        self.draws = np.random.default_rng(0)

    def fit(self, x, targets, weight):
        """Go on for some epochs."""
        x, weight = x.reshape(len(x), -1), weight / weight.mean()
        weights = self.weights or self._drawn(x.shape[1])
        speed = jax.tree.map(np.zeros_like, weights)
        for _ in range(EPOCHS):
            order = self.draws.permutation(len(x))
            for rows in np.resize(order, (-(-len(x) // BATCH), BATCH)):  # batches of one size are compiled once
                weights, speed = step(weights, speed, x[rows], targets[rows], weight[rows])
        self.weights = jax.tree.map(np.asarray, weights)

    def predict_proba(self, x):
        """Distributions (n, classes)."""
        return np.asarray(jax.nn.softmax(logits(self.weights, jnp.asarray(x.reshape(len(x), -1)))))

    def _drawn(self, inputs):
        shapes = {
            "in": (inputs, HIDDEN),
            "in_bias": (HIDDEN,),
            "out": (HIDDEN, self.classes),
            "out_bias": (self.classes,),
        }
        spread = {"in": (2 / inputs) ** 0.5, "out": (1 / HIDDEN) ** 0.5}
        return {n: (self.draws.normal(0, spread.get(n, 0.0), of)).astype(np.float32) for n, of in shapes.items()}


if __name__ == "__main__":
    node.main("jax net", Net)
