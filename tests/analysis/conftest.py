"""Miniature runs, written by hand as a run would write them, so that every number in a test is known beforehand."""

import json
import tomllib

import pytest

from potluck.records import CHECKPOINT, LAST, Checkpoint
from potluck.seals import extent_up_to, what_matters

CONFIG = """\
[federation]
dataset = "{dataset}"
clients = 4
models = [
    {{ name = "small" }},
    {{ name = "large", width = 8 }},
]
validation_fraction = 0.1

[federation.partition]
name = "dirichlet"
alpha = 0.5

[method]
name = "{method}"

[method.training]
lr = {lr}

[run]
rounds = {planned}
seed = {seed}
evaluate_every = 2
common_test = true
threads = 1
"""
LARGE = "large(width=8)"


def round_line(number, *, personal=None, validation=None, common=None, whole=None, down=1_500_000, up=500_000):
    """A round of four clients; `personal` lists their accuracies, of which the first two have the small model."""
    small, large = (_mean(personal[:2]), _mean(personal[2:])) if personal else (None, None)
    mean = _mean(personal) if personal else None
    return {
        "round": number,
        "cohort": [0, 1, 2, 3],
        "replied": [0, 1, 2, 3],
        "failed": {},
        "bytes_down": down,
        "bytes_up": up,
        "bytes_down_by_entry": {"weights": down},
        "bytes_up_by_entry": {"examples": 80, "weights": up - 80},
        "bytes_evaluation": 250_000 if personal else 0,
        "loss_local": 1.25,
        "accuracy_validation_mean": validation,
        "accuracy_personal_mean": mean,
        "accuracy_personal_std": _mean([(value - mean) ** 2 for value in personal]) ** 0.5 if personal else None,
        "accuracy_personal_worst": min(personal) if personal else None,
        "accuracy_personal_by_architecture": {"small": small, LARGE: large} if personal else None,
        "accuracy_common_mean": common,
        "accuracy_common_by_architecture": {"small": common - 0.1, LARGE: common + 0.1} if common else None,
        "accuracy_global": whole,
    }


def client_lines(line):
    """The lines of `clients.jsonl` that go with an evaluated round."""
    by_architecture = line["accuracy_personal_by_architecture"]
    return [
        {
            "round": line["round"],
            "client": client,
            "architecture": architecture,
            "examples_train": 30,
            "examples_test": 10,
            "accuracy_personal": by_architecture[architecture],
            "accuracy_common": None,
            "accuracy_validation": None,
        }
        for client, architecture in enumerate(["small", "small", LARGE, LARGE])
        if by_architecture
    ]


def _mean(values):
    return sum(values) / len(values)


def _lines(objects):
    return "".join(json.dumps(item) + "\n" for item in objects)


# The best test accuracy is in round 4, the best validation accuracy in round 2 and again in round 4.
FOUR_ROUNDS = (
    round_line(1),
    round_line(2, personal=[0.2, 0.4, 0.4, 0.6], validation=0.5, common=0.35),
    round_line(3),
    round_line(4, personal=[0.3, 0.5, 0.7, 0.9], validation=0.5, common=0.55, whole=0.625),
    round_line(5, down=3_000_000),
    round_line(6, personal=[0.3, 0.5, 0.6, 0.8], validation=0.4, common=0.5, whole=0.575),
)


@pytest.fixture(scope="session", autouse=True)
def matplotlib_is_warm():
    """The first picture on a machine makes a list of its fonts; no test is charged for that."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0.5, 0.5, "warm")
    FigureCanvasAgg(figure).draw()


@pytest.fixture
def store_run(tmp_path):
    """A function that stores a run below the test's folder, and returns the run's folder."""

    def store(
        name="run", rounds=FOUR_ROUNDS, *, method="fedin", dataset="digits", seed=0, lr=0.005, planned=6, **facts
    ):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        values = {"method": method, "dataset": dataset, "seed": seed, "lr": lr, "planned": planned}
        (folder / "config.toml").write_text(CONFIG.format(**values))
        manifest = {"schema_version": 1, "status": "finished", **facts}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        (folder / "rounds.jsonl").write_text(_lines(rounds))
        evaluated = [line for line in rounds if line["accuracy_personal_by_architecture"]]
        (folder / "clients.jsonl").write_text(_lines(client for line in evaluated for client in client_lines(line)))
        return folder

    return store


@pytest.fixture
def seal():
    """A function that seals a stored run as its last checkpoint does, and returns the run's folder."""

    def sealed(folder):
        last = len((folder / "rounds.jsonl").read_bytes().splitlines())
        config = what_matters(tomllib.loads((folder / "config.toml").read_text()))
        records = {name: extent_up_to(folder / name, last) for name in ("rounds.jsonl", "clients.jsonl")}
        checkpoint = Checkpoint(last, ("part-0a.safetensors",), {}, 0.5, 2, records, config)
        (folder / CHECKPOINT).mkdir()
        (folder / CHECKPOINT / LAST).write_bytes(checkpoint.sealed())
        return folder

    return sealed


@pytest.fixture
def make_round():
    """The function that makes a line of `rounds.jsonl`, for runs that differ from the usual one."""
    return round_line


@pytest.fixture
def write_clients():
    """A function that gives the clients of a stored run of one round these accuracies, and returns its folder."""

    def write(folder, values):
        lines = [
            {
                "round": 1,
                "client": client,
                "architecture": "small" if client < 2 else LARGE,
                "examples_train": 30,
                "examples_test": 10,
                "accuracy_personal": value,
                "accuracy_common": None,
                "accuracy_validation": None,
            }
            for client, value in enumerate(values)
        ]
        (folder / "clients.jsonl").write_text(_lines(lines))
        return folder

    return write
