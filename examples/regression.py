"""A regression: the progress of diabetes in a year, from ten measurements, by perceptrons of three depths.

Six clients hold some 45 patients each and share no weights: they teach each other by predictions for patients whose
outcomes are unknown (FedMD). The data come with scikit-learn; outcomes are brought to mean 0 and spread 1. Writes the
data, a run's folder and its report, all below the current folder:

    python examples/regression.py
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes

from potluck.analysis.report import write_report
from potluck.cli.run import start_run

DATA, RUNS = Path("diabetes.npz"), Path("runs-regression")
SETTINGS = (
    f"federation.dataset={DATA}",
    "federation.task=regression",
    "federation.clients=6",
    "federation.models=['mlp2', 'mlp3', 'mlp4']",
    "federation.public=holdout",
    "federation.public_fraction=0.2",
    "method.training.epochs=3",
    "run.rounds=6",
    "run.workers=1",
)


def write_data() -> None:
    """The 442 patients as arrays of a data set; every fourth is a test example."""
    features, progress = load_diabetes(return_X_y=True)
    features, progress = features / features.std(0), (progress - progress.mean()) / progress.std()
    test = np.arange(len(progress)) % 4 == 0
    arrays = {
        "x_train": features[~test],
        "y_train": progress[~test],
        "x_test": features[test],
        "y_test": progress[test],
    }
    np.savez(DATA, **{name: array.astype(np.float32) for name, array in arrays.items()})


def main() -> None:
    """Run, print the table, write the report."""
    write_data()
    start_run("fedmd", SETTINGS, RUNS)
    for name in (DATA, write_report([RUNS], Path("report-regression"))):
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
