"""Gradient-boosted trees as a client: those of xgboost, or without it scikit-learn's.

    python examples/foreign/boosting.py HOST:PORT --keys ... --data ... --public ...

As the forest, they are grown anew at every lesson, and an example with a soft label is there once for each class.
"""

import node
import numpy as np
from forest import Forest
from sklearn.ensemble import HistGradientBoostingClassifier

try:
    from xgboost import XGBClassifier
except ImportError:
    XGBClassifier = None


class Boosted(Forest):
    """Boosted trees over flattened inputs."""

    def __init__(self, classes):
        super().__init__(classes, _scikit_learns() if XGBClassifier is None else XGBoosted())


class XGBoosted:
    """Xgboost's trees, for labels that need not be 0 to the number of classes."""

    def fit(self, x, labels, sample_weight):
        """Grow them anew."""
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        self.trees = XGBClassifier(n_estimators=30, max_depth=4, n_jobs=1, random_state=0)
        self.trees.fit(x, numbers, sample_weight=sample_weight)

    def predict_proba(self, x):
        """Distributions over the classes that occurred."""
        return self.trees.predict_proba(x)


def _scikit_learns():
    return HistGradientBoostingClassifier(max_iter=30, max_depth=4, random_state=0)


if __name__ == "__main__":
    node.main("boosted trees", Boosted)
