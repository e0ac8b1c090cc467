"""A random forest as a client: python examples/foreign/forest.py HOST:PORT --keys ... --data ... --public ...

A forest cannot go on from where it was: it is grown anew at every lesson, from the client's own examples and the public
ones with the others' labels. Trees know hard classes alone, so an example with a soft label is there once for each
class, and counts as much as the class's probability.
"""

import node
import numpy as np
from sklearn.ensemble import RandomForestClassifier

LEAST = 1e-3  # a class of which an example has less is left out


class Forest:
    """Trees over flattened inputs."""

    def __init__(self, classes, learner=None):
        self.classes = classes
        self.learner = learner or RandomForestClassifier(100, min_samples_leaf=2, random_state=0)

    def fit(self, x, targets, weight):
        """Grow it anew."""
        rows, labels = np.nonzero(targets > LEAST)
        counts = targets[rows, labels] * weight[rows]
        self.learner.fit(x.reshape(len(x), -1)[rows], labels, sample_weight=counts)

    def predict_proba(self, x):
        """Distributions (n, classes); 0 for classes that it has never met."""
        found = np.zeros((len(x), self.classes))
        found[:, self.learner.classes_] = self.learner.predict_proba(x.reshape(len(x), -1))
        return found


if __name__ == "__main__":
    node.main("forest", Forest)
