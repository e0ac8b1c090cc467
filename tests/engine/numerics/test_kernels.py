"""Portable kernels: one digest, however a program was started and whatever the processor is said to have."""

import os
import subprocess
import sys

import pytest
import torch

from potluck.core.ground.errors import ConfigError, StartAnew
from potluck.engine.numerics.kernels import ENVIRONMENT, KNOWN, make_portable
from potluck.engine.numerics.numerics import Numerics
from potluck.experiment.settings.schema import RunConfig
from potluck.records import CHECKPOINT, LAST, Checkpoint

PORTABLE = "run.computing.kernels=portable"
SETTINGS = [
    "federation.dataset=digits", "federation.train_fraction=0.2", "federation.public=holdout", "federation.clients=3",
    'federation.models=["cnn2", {name = "vit", depth = 1}]', "run.rounds=2", "run.executor=sequential",
]  # fmt: skip
STARTED = {
    "as it comes": {},
    "capability": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "MKL": {"MKL_CBWR": "AVX2"},
    "libm": {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA"},
    "threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    "as it should": ENVIRONMENT,
}


def potluck(place, *words, **environment):
    """Carry out a command in `place`, in a program started with this environment; its output."""
    unset = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    command = [sys.executable, "-m", "potluck", *words]
    done = subprocess.run(command, cwd=place, env={**unset, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def digest(place, *words, **environment):
    """The digest of a run's last checkpoint."""
    place.mkdir()
    potluck(place, "run", "fedmd", *SETTINGS, *words, **environment)
    (folder,) = (place / "runs").iterdir()
    return Checkpoint.read(folder / CHECKPOINT / LAST).digest


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return digest(tmp_path_factory.mktemp("kernels") / "plain", PORTABLE)


@pytest.mark.slow
@pytest.mark.parametrize("environment", STARTED.values(), ids=STARTED)
def test_the_digest_is_the_same_however_the_program_was_started(tmp_path, expected, environment):
    assert digest(tmp_path / "run", PORTABLE, **environment) == expected


@pytest.mark.slow
def test_workers_and_runs_that_are_resumed_give_the_same_digest(tmp_path, expected):
    assert digest(tmp_path / "workers", PORTABLE, "run.executor=workers", "run.workers=2") == expected
    digest(tmp_path / "half", PORTABLE, "run.rounds=1")
    (folder,) = (tmp_path / "half/runs").iterdir()
    potluck(tmp_path, "run", "--resume", str(folder), "run.rounds=2", ATEN_CPU_CAPABILITY="avx2")
    assert Checkpoint.read(folder / CHECKPOINT / LAST).digest == expected


@pytest.mark.slow
def test_actors_give_the_same_digest(tmp_path, expected):
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    assert digest(tmp_path / "actors", PORTABLE, "run.executor=ray", "run.workers=2") == expected


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="the processor has nothing to leave out"
)
def test_without_them_the_digest_depends_on_the_processor(tmp_path, expected):
    """Else the tests above would show nothing."""
    plain, less = (digest(tmp_path / name, ATEN_CPU_CAPABILITY=name) for name in ("avx2", "default"))
    assert len({plain, less, expected}) == 3


def test_a_program_that_was_started_otherwise_is_told_how(monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    with pytest.raises(StartAnew, match="by: ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE") as told:
        make_portable()
    assert told.value.environment == ENVIRONMENT


def test_variables_that_are_set_too_late_are_noticed(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    with pytest.raises(ConfigError, match="before Python starts"):
        make_portable()


@pytest.mark.slow
def test_a_processor_that_computes_otherwise_is_refused(tmp_path):
    """Played by kernels of another kind: oneDNN's stay, which the answer of the sample shows."""
    still = "kernels._LIBRARIES.leave_out = lambda: None"
    code = f"from potluck.engine.numerics import kernels\n{still}\nkernels.make_portable()"
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    assert "computes otherwise than those that were tried" in ended.stderr


def test_the_torch_of_the_tests_is_one_that_was_tried():
    assert ".".join(torch.__version__.split(".")[:2]) in KNOWN


@pytest.mark.parametrize("beside", [{"precision": "bf16"}, {"layout": "channels_last"}, {"device": "cuda"}])
def test_they_are_refused_beside_what_was_not_tried(beside):
    with pytest.raises(ConfigError, match="kernels: expected none with another precision, layout or device"):
        Numerics(kernels="portable", **beside)
    with pytest.raises(ConfigError, match="threads: expected 1 with portable kernels"):
        RunConfig(threads=2, computing=Numerics(kernels="portable"))
