"""Tables at nodes: every site reads its own as the server's is read, and knows of that what the server tells."""

import json

import numpy as np
import pandas as pd
import pytest

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import ConfigError
from potluck.data.tables.tokenizer import LARGEST_TOKENIZER, learned
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.flower.node.asked import asked
from potluck.flower.node.clientapp import client_app
from potluck.flower.node.config import NodeConfig
from potluck.flower.server.serve import serve
from potluck.records import CHECKPOINT, CLIENTS, LAST, ROUNDS, Checkpoint
from potluck.testing.loopback import Loopback, through

NETS = """
from torch import nn


class Bag(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(257, 8), nn.Linear(8, 8), nn.Linear(8, num_classes)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        return self.out(self.hidden((self.embed(input_ids) * mask).sum(1) / mask.sum(1)).relu())


class Beside(nn.Module):
    \"\"\"Reads the columns that are no text, alone.\"\"\"

    def __init__(self, num_classes, input_shape):
        super().__init__()
        (width,) = input_shape["columns"].shape
        self.hidden, self.out = nn.Linear(width, 8), nn.Linear(8, num_classes)

    def forward(self, columns):
        return {"logits": self.out(self.hidden(columns).relu()), "probed": columns}


class Tokens(nn.Module):
    \"\"\"Reads as many tokens as there are.\"\"\"

    def __init__(self, num_classes, vocab_size, pad_token_id):
        super().__init__()
        self.embed, self.out = nn.Embedding(vocab_size, 12, padding_idx=pad_token_id), nn.Linear(12, num_classes)
        self.hidden = nn.Linear(12, 12)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        return self.out(self.hidden((self.embed(input_ids) * mask).sum(1) / mask.sum(1)).relu())


class Largest(nn.Module):
    \"\"\"Takes the largest value over tokens.\"\"\"

    def __init__(self, num_classes, vocab_size=2):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(vocab_size, 8), nn.Linear(8, 8), nn.Linear(8, num_classes)

    def forward(self, input_ids):
        return self.out(self.hidden(self.embed(input_ids).amax(1)).relu())
"""


def rows(count, seed, shift=0.0):
    """Patients, the older of whom are ill, with a note that says so."""
    draws = np.random.default_rng(seed)
    age = draws.normal(50 + shift, 10, count).round()
    ill = age + draws.normal(0, 3, count) > 50
    notes = [" ".join(draws.choice(["cough", "fever"] if one else ["fine", "calm"], 3)) for one in ill]
    sexes = draws.choice(["f", "m"], count)
    return pd.DataFrame({"age": age, "sex": sexes, "note": notes, "state": np.where(ill, "ill", "well")})


@pytest.fixture
def sites(tmp_path):
    """The server's table, those of three sites, and a file of networks."""
    tmp_path.joinpath("nets.py").write_text(NETS)
    rows(80, 0).to_csv(tmp_path / "common.csv", index=False)
    for number in range(3):
        rows(50, 1 + number, shift=4.0 * number).to_csv(tmp_path / f"site{number}.csv", index=False)
    return tmp_path


def tree(sites, models, method="fedproto", **columns):
    return {
        "federation": {
            "dataset": str(sites / "common.csv"),
            "columns": {"target": "state", "inputs": ["age", "sex"], **columns},
            "clients": 3,
            "models": models,
        },
        "method": {"name": method},
        "run": {"rounds": 2, "executor": "sequential", "common_test": False},
    }


def found_in(folder):
    records = [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS)]
    return [*records, Checkpoint.read(folder / CHECKPOINT / LAST).digest]


def here(wanted, sites):
    own = {**wanted["federation"], "data": [str(sites / f"site{n}.csv") for n in range(3)]}
    experiment, folder = resolve({**wanted, "federation": own}), sites / "here"
    folder.mkdir()
    execute(prepare(experiment, assemble(experiment), folder), experiment, folder)
    return found_in(folder)


def at_nodes(wanted, sites):
    said = []
    homes = [
        {"state": str(sites / f"node{n}"), "data": str(sites / f"site{n}.csv"), "code": str(sites / "nets.py")}
        for n in range(3)
    ]
    grid = Loopback({f"node{n}": through(client_app, home) for n, home in enumerate(homes)})
    serve(grid, wanted, sites / "flower", say=said.append)
    return found_in(sites / "flower")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_a_federation_of_tables_gives_the_bytes_at_nodes_that_it_gives_in_process(sites, method):
    wanted = tree(sites, ["mlp2", "mlp3"] if method == "fedproto" else ["mlp2"], method)
    assert at_nodes(wanted, sites) == here(wanted, sites)


@pytest.mark.slow
def test_sites_that_read_text_and_sites_that_read_columns_are_one_federation(sites):
    models = [f"{sites / 'nets.py'}:Bag", f"{sites / 'nets.py'}:Beside", f"{sites / 'nets.py'}:Bag"]
    wanted = tree(sites, models, inputs=["age", "sex", "note"], text=["note"], tokens=24)
    found = at_nodes(wanted, sites)
    assert found == here(wanted, sites)
    assert json.loads(found[0].splitlines()[-1])["replied"] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kinds"), [("fml", ["Tokens", "Largest"]), ("fedavg", ["Tokens"])])
def test_sites_read_texts_by_the_servers_tokenizer(sites, method, kinds):
    pytest.importorskip("tokenizers", reason="the extra 'text' is not installed")
    content = learned(rows(80, 0)["note"], 270)
    (sites / "tokenizer.json").write_text(content)
    wanted = tree(sites, [f"{sites / 'nets.py'}:{kind}" for kind in kinds], method, inputs=["note"], text=["note"])
    wanted["federation"]["columns"] |= {"tokens": 8, "tokenizer": str(sites / "tokenizer.json")}
    wanted["method"]["training"] = {"lr": 0.03, "epochs": 15}
    found = at_nodes(wanted, sites)
    assert found == here(wanted, sites)
    last = json.loads(found[0].splitlines()[-1])
    assert last["replied"] == [0, 1, 2]
    assert last["metrics"]["personal"]["accuracy"] > 0.7, last
    log = json.loads((sites / "node0" / "audit.jsonl").read_text().splitlines()[0])
    assert log["settings"]["federation"]["columns"]["known"]["tokenizer"] == digest(content.encode()), "not megabytes"


@pytest.mark.slow
def test_a_site_whose_table_lacks_a_column_takes_no_part_and_is_told_why(sites):
    rows(50, 2).drop(columns="sex").to_csv(sites / "site1.csv", index=False)
    wanted, said = tree(sites, ["mlp2"]), []
    wanted["run"] |= {"tolerate_failures": True, "rounds_close": {"quorum": 2, "deadline_s": 20}}
    homes = [{"state": str(sites / f"node{n}"), "data": str(sites / f"site{n}.csv")} for n in range(3)]
    grid = Loopback({f"node{n}": through(client_app, home) for n, home in enumerate(homes)})
    serve(grid, wanted, sites / "flower", say=said.append)
    assert any("no column 'sex'" in line for line in said), said


def told(sites, **columns):
    return {
        "federation": {"dataset": "their.csv", "clients": 1, "models": ["mlp2"], "columns": columns},
        "method": {"name": "local"},
    }


def own(sites):
    return NodeConfig.of({"state": str(sites / "home"), "data": str(sites / "site0.csv")})


KNOWN = {"numbers": {"age": [50.0, 10.0]}, "names": {"sex": ["f", "m"]}, "text": [], "classes": ["ill", "well"]}


def test_names_of_columns_may_be_any_text_and_open_nothing(sites):
    strange = "Age at onset (years), as in /etc/passwd"
    known = {**KNOWN, "numbers": {strange: [50.0, 10.0]}}
    experiment = asked(told(sites, target="state", inputs=[strange], known=known), own(sites), 0, None)
    assert experiment.federation.dataset == str(sites / "site0.csv"), "the owner's, whatever the server's is"
    assert experiment.federation.columns.inputs == (strange,)


def test_a_tokenizer_is_told_by_its_content_and_never_by_a_path(sites):
    content = '{"text": "/etc/passwd\n\u0007"}'
    known = {**KNOWN, "text": ["note"], "tokenizer": content}
    found = asked(told(sites, target="state", inputs=["age"], known=known), own(sites), 0, None)
    assert found.federation.columns.known["tokenizer"] == content
    path = str(sites / "nets.py")
    for columns in ({"tokenizer": path, "text": ["note"]}, {"tokenizer": path, "known": known}):
        with pytest.raises(ConfigError, match=r"columns.tokenizer: found .*an experiment names no files at a node"):
            asked(told(sites, target="state", **columns), own(sites), 0, None)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (["a"], "found list; expected the text of"),
        ("x" * (LARGEST_TOKENIZER + 1), "found 2,097,153 characters"),
        ("no tokenizer", "found no tokenizer"),
    ],
)
def test_what_a_server_calls_a_tokenizer_is_read_or_refused_in_one_line(sites, content, expected):
    pytest.importorskip("tokenizers", reason="the extra 'text' is not installed")
    known = {**KNOWN, "text": ["note"], "tokenizer": content}
    with pytest.raises(ConfigError, match=f"federation.columns.tokenizer: {expected}") as found:
        asked(told(sites, target="state", text=["note"], known=known), own(sites), 0, None)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["two\nlines", "x" * 2_000, "bell \x07"])
def test_names_that_could_not_be_shown_are_refused(sites, name):
    with pytest.raises(ConfigError, match=r"the server's federation.columns.*expected a name, printable"):
        asked(told(sites, target=name), own(sites), 0, None)
