"""Several labels for each image: four properties of handwritten digits, by three families of networks.

A digit may be even, large (above 4), have a closed loop, and be prime: any of them together, or none. Six clients with
convolutional nets, perceptrons and wide perceptrons train as FedMD has it. Writes the data, a run's folder and its
report, all below the current folder:

    python examples/multilabel.py
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from potluck.analysis.report import write_report
from potluck.cli.run import start_run

DATA, RUNS = Path("properties.npz"), Path("runs-multilabel")
EVEN, LARGE, LOOP, PRIME = {0, 2, 4, 6, 8}, {5, 6, 7, 8, 9}, {0, 6, 8, 9}, {2, 3, 5, 7}
SETTINGS = (
    f"federation.dataset={DATA}",
    "federation.task=multilabel",
    "federation.clients=6",
    "federation.models=['cnn2', 'mlp3', {name='mlp2', width=96}]",
    "federation.public=holdout",
    "method.training.epochs=2",
    "run.rounds=8",
    "run.workers=1",
)


def write_data() -> None:
    """The 1,797 digits of scikit-learn as images of bytes, each with four labels; every fifth is a test example."""
    images, digits = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * 15).astype(np.uint8)
    labels = np.array([[digit in property for property in (EVEN, LARGE, LOOP, PRIME)] for digit in digits])
    test = np.arange(len(digits)) % 5 == 0
    np.savez(DATA, x_train=images[~test], y_train=labels[~test], x_test=images[test], y_test=labels[test])


def main() -> None:
    """Run, print the table, write the report."""
    write_data()
    start_run("fedmd", SETTINGS, RUNS)
    for name in (DATA, write_report([RUNS], Path("report-multilabel"))):
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
