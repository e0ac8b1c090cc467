"""Data, models and settings from outside that cannot be meant: one line each, before memory is taken, nothing left."""

import errno
import io
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

NETS = """
from torch import nn, zeros

class Net(nn.Module):
    def __init__(self, outputs, after):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
        self.after = after

    def forward(self, x):
        return self.after(self.layers(x))

def named(num_classes, input_shape): return Net(num_classes, lambda logits: {"scores": logits, "again": logits})
def paired(num_classes, input_shape): return Net(num_classes, lambda logits: (logits, None))
def broken(num_classes, input_shape): return Net(num_classes, lambda logits: logits / 0)
def narrow(num_classes, input_shape): return Net(7, lambda logits: logits)
def lazy(num_classes, input_shape): return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
def wide(num_classes, input_shape): return nn.Sequential(nn.Flatten(), nn.Linear(65, num_classes))
def nothing(num_classes, input_shape): Net(num_classes, None)
def refuses(num_classes, input_shape): raise RuntimeError("no such thing")

class Rows(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.rows, self.out = nn.GRU(8, 8, batch_first=True), nn.Linear(8, outputs)

    def forward(self, x):
        return self.out(self.rows(x[:, 0])[0][:, -1])

def recurrent(num_classes, input_shape): return Rows(num_classes)
"""


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> None:
    """What reads the digits is loaded before the clock of a test runs."""
    import sklearn.datasets  # noqa: F401


def arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (48, 8, 8), dtype=np.uint8)
    labels = np.arange(48) % 4
    return {"x_train": images[:40], "y_train": labels[:40], "x_test": images[40:], "y_test": labels[40:]} | changes


def write_bomb(path: Path) -> None:
    """An archive of a few kilobytes whose images would take four terabytes."""
    header = io.BytesIO()
    described = {"descr": "|u1", "fortran_order": False, "shape": (62_500_000_000, 8, 8)}
    np.lib.format.write_array_header_1_0(header, described)
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays().items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{name}.npy", header.getvalue() if name == "x_train" else content.getvalue())


def write_large_images(folder: Path) -> None:
    """A folder of images that say that they have 30,000 x 30,000 pixels."""
    header = b"IHDR" + struct.pack(">II", 30_000, 30_000) + bytes([8, 0, 0, 0, 0])
    chunks = [struct.pack(">I", 13), header, struct.pack(">I", zlib.crc32(header)), struct.pack(">I4s", 64, b"IDAT")]
    for part in ("train", "test"):
        (folder / part / "a").mkdir(parents=True)
        (folder / part / "a" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


@pytest.fixture
def given(tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    folder.mkdir()
    write_bomb(folder / "bomb.npz")
    write_large_images(folder / "large")
    np.savez(folder / "labels.npz", **arrays(y_train=np.arange(40) % 2 * 10**9))  # type: ignore[arg-type]
    np.savez(folder / "single.npz", **arrays(x_train=np.float32(1)))  # type: ignore[arg-type]
    np.savez(folder / "mixed.npz", **arrays(x_train=np.zeros((40, 8, 8), np.float32)))  # type: ignore[arg-type]
    (folder / "nets.py").write_text(NETS)
    (folder / "missing.py").write_text("import no_such_module\n")
    (folder / "dated.toml").write_text("[run]\nseed = 2026-01-01\n")
    return folder


def model(name: str, method: str = "local") -> str:
    return f"run {method} 'federation.models=[\"given/{name}\"]'"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run local federation.dataset=given/bomb.npz", "4,000,000,000,000 bytes, and holds 0"),
        ("run local federation.dataset=given/labels.npz", "labels: 1000000001 classes; expected 1 to 1,000,000"),
        ("run local federation.dataset=given/single.npz", "x_train is a single value"),
        ("run local federation.dataset=given/mixed.npz", "x_train is float32 but x_test uint8"),
        ("run local federation.dataset=given/large", "given/large/train/a/0.png: more than 89,478,485 pixels"),
        ("run local federation.dataset=https://example.org/a.npz", "https://example.org/a.npz: an address on the web"),
        ("run local run.memory_gib=inf", "found inf"),
        ("run local run.threads=1000000", "found 1000000"),
        ("run local 'federation.models=[{name=\"cnn2\",width=1000000}]'", "cnn2(width=1000000): its weights and"),
        ("run given/dated.toml run.rounds=1", "run.seed: found a date or time, 2026-01-01"),
        (model("nets.py:lazy"), "nets.py:lazy: 1.weight has no shape yet; give lazy layers their sizes"),
        (model("nets.py:named"), "nets.py:named: returns dict; expected logits of shape (batch, 10): return the one"),
        (model("nets.py:paired"), "nets.py:paired: returns tuple; expected logits of shape (batch, 10): return the"),
        (model("nets.py:narrow"), "nets.py:narrow: returns a tensor of shape (batch, 7); expected logits of shape"),
        (model("nets.py:broken"), "nets.py:broken: returns NaN or infinity in evaluation mode, with its first weights"),
        (model("nets.py:wide"), "nets.py:wide: cannot read inputs of shape (batch, 1, 8, 8) in evaluation mode: Run"),
        (model("nets.py:nothing"), "nets.py:nothing: returned NoneType; expected a torch.nn.Module"),
        (model("nets.py:refuses"), "nets.py:refuses: cannot be built: RuntimeError: no such thing; "),
        (model("missing.py:net"), "missing.py: cannot be imported: ModuleNotFoundError: No module named 'no_such"),
        (model("nets.py:recurrent", "heterofl"), "has no slices: layer rows (GRU) calls gru, through which"),
        (model("nets.py:recurrent", "splitmix"), "has no slices: layer rows (GRU) calls gru, through which"),
        ('run heterofl \'federation.models=["mlp2","mlp3"]\'', "it needs one architecture, but client 0 has mlp2"),
        ("run local --to given/dated.toml", "given/dated.toml"),
    ],
)
@pytest.mark.usefixtures("given")
def test_what_cannot_be_meant_is_one_line_and_leaves_nothing(potluck, tmp_path, line, expected):
    outcome = potluck(f"{line} run.rounds=1" if ".toml" not in line else line)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("potluck: ")
    assert expected in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


def test_a_model_file_that_imports_its_neighbour_is_played(potluck, tmp_path):
    (tmp_path / "nets.py").write_text(
        "from layers import last\nfrom torch import nn\n"
        "def net(num_classes, input_shape): return nn.Sequential(nn.Flatten(), last(num_classes))\n"
    )
    (tmp_path / "layers.py").write_text("from torch import nn\ndef last(classes): return nn.Linear(64, classes)\n")
    line = "run local 'federation.models=[\"nets.py:net\"]' federation.clients=2 run.rounds=1 run.executor=sequential"
    outcome = potluck(f"{line} federation.train_fraction=0.1")
    assert outcome.code == 0, outcome.err


def test_a_folder_that_was_there_stays_where_a_run_is_refused(potluck, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "nets.py").write_text(NETS)
    assert potluck("run local 'federation.models=[\"nets.py:narrow\"]'").code == 2
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("place", ["folder", "write"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_is_one_line(potluck, monkeypatch, place, number):
    name = "mkdir" if place == "folder" else "open"
    real = getattr(Path, name)

    def refused(self, *args, **kwargs):
        if self.parts[0] == "runs":
            raise OSError(number, "the system's words", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, name, refused)
    outcome = potluck("run local federation.clients=2 run.rounds=1 run.executor=sequential")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1, outcome.err
    assert "the system's words" in outcome.err
    assert "runs" in outcome.err


def test_memory_that_runs_out_is_one_line(potluck, monkeypatch):
    def refused(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("potluck.cli.run.assemble", refused)
    outcome = potluck("run local")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "no memory is left" in outcome.err
