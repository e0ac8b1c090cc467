"""Runs whose replies are summed securely: what the server gets, who fails, what it costs, and what is refused."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from potluck import fl
from potluck.analysis.read import read_run
from potluck.analysis.report import report_text
from potluck.attackers.settings import Attackers
from potluck.core.ground.errors import ConfigError
from potluck.core.roles import ClientFailure
from potluck.engine.rounds.asynchrony.rules import Asynchrony
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running import run as running
from potluck.experiment.running.run import Run
from potluck.experiment.running.secure_sums import AddingHere
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import RoundsClose, RunConfig
from potluck.experiment.settings.secure import SecureRule
from potluck.experiment.settings.tables import read_toml
from potluck.methods import get_method
from potluck.methods.fedavg import FedAvg, State
from potluck.records import CONFIG, COSTS, ROUNDS
from potluck.secure.server import SecureServer
from potluck.testing.worlds import World, packed_state, quick, toy_federation
from potluck.twin.devices import Twin

from ..carried_out import carried_out

FEDAVG = quick(get_method("fedavg"))
ALIKE = World(clients=7, architectures=1)


def played(method=FEDAVG, world=ALIKE, folder=None, **config):
    """A run that is over, and its records."""
    given = {"rounds": 2, "secure_sums": True, "common_test": False, "executor": "sequential", **config}
    run = Run(method, toy_federation(world), RunConfig(**given), folder)
    return run, run.run().rounds


@dataclass(frozen=True)
class Watched(FedAvg):
    """Keeps what clients have learnt, and what the server is given."""

    def round(self, state, cohort, server):
        replies = cohort.ask(self.local_update, self.sharing.send(state.weights, cohort, server))
        GIVEN.append({client: dict(reply["weights"]) for client, reply in replies.items()})
        return State(self.sharing.merge(state.weights, replies, server.roster))

    @fl.on_client
    def local_update(self, client, message):
        reply = yield from super().local_update(client, message)
        if client.id in FAILING.get(client.round, ()):
            raise RuntimeError("the disk is full")
        LEARNT[client.round, client.id] = {name: tensor.clone() for name, tensor in reply["weights"].items()}
        return reply


GIVEN, LEARNT, FAILING, WORDS = [], {}, {}, []
WATCHED = replace(Watched(), training=FEDAVG.training)


@pytest.fixture(autouse=True)
def watching(monkeypatch):
    """Notes what servers take of clients, too."""
    for noted in (GIVEN, LEARNT, FAILING, WORDS):
        noted.clear()
    take = SecureServer.take

    def noting(server, client, answer):
        if server.step == 2:
            WORDS.append((client, answer))
        take(server, client, answer)

    monkeypatch.setattr(SecureServer, "take", noting)


def test_of_a_clients_tensors_the_server_gets_nothing_but_means():
    played(WATCHED, replace(ALIKE, clients=4))
    for number, replies in enumerate(GIVEN, 1):
        for name, tensor in replies[0].items():
            assert all(torch.equal(reply[name], tensor) for reply in replies.values())
            own = [LEARNT[number, client][name] for client in range(4)]
            sizes = [40 + 8 * client for client in range(4)]
            mean = sum(size * one for size, one in zip(sizes, own, strict=True)) / sum(sizes)
            assert_close(tensor, mean, rtol=1e-5, atol=1e-6)
            assert not any(torch.equal(one, tensor) for one in own)


def test_what_clients_send_looks_like_noise_and_has_none_of_their_numbers():
    played(WATCHED, replace(ALIKE, clients=4), rounds=1)
    assert len(WORDS) == 4
    for client, answer in WORDS:
        words = np.frombuffer(answer[-8 * (len(answer) // 8) :], np.uint64)
        bits = np.unpackbits(words.view(np.uint8)).mean()
        assert abs(bits - 0.5) < 0.02
        units = {
            int(unit) % 2**64 for t in LEARNT[1, client].values() for unit in (t.double() * 2**24).round().flatten()
        }
        assert units.isdisjoint(words.tolist())


def test_two_runs_have_other_words_and_the_same_bytes():
    states, sent = [], []
    for _ in range(2):
        run, _ = played(rounds=2)
        states.append(packed_state(run._state))
        sent.append({answer for _, answer in WORDS})
        WORDS.clear()
    assert states[0] == states[1]
    assert sent[0].isdisjoint(sent[1])


def test_a_client_that_fails_in_the_middle_is_in_no_sum():
    FAILING[1] = (2, 5)
    plain, secure = (played(WATCHED, secure_sums=one, rounds=1, tolerate_failures=True) for one in (None, True))
    (record,) = secure[1]
    assert list(record.failed) == ["2", "5"]
    assert "the disk is full" in record.failed["2"]
    assert record.replied == [0, 1, 3, 4, 6]
    assert sorted({client for client, _ in WORDS}) == record.replied
    for name, tensor in plain[0]._state.weights["all"].items():
        assert_close(secure[0]._state.weights["all"][name], tensor, rtol=1e-5, atol=1e-5)


def test_a_round_of_which_too_few_are_left_is_lost_and_the_next_goes_on():
    FAILING[2] = (2, 3, 5)
    _, records = played(WATCHED, rounds=3, tolerate_failures=True)
    assert [record.lost is None for record in records] == [True, False, True]
    assert records[1].lost.startswith(
        "secure sums: 4 of 7 clients sent words, and 5 must; nothing is summed in this round"
    )
    assert "client 2 failed in" in records[1].lost
    assert records[1].secure["refused"] == 1
    assert records[1].bytes_up == records[1].secure["bytes_up"] > 0
    assert len(records[1].failed) == 7
    assert "the disk is full" in records[1].failed["3"]
    assert records[1].failed["0"].startswith("secure sums: 4 of 7")
    assert len(GIVEN) == 2


def test_without_tolerance_the_clients_own_failure_ends_the_run():
    FAILING[1] = (3,)
    with pytest.raises(ClientFailure, match=r"client 3 failed in .*the disk is full"):
        played(WATCHED)


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_bytes_of_one_that_was_not_stopped(tmp_path):
    whole, _ = played(folder=tmp_path / "whole", rounds=3)
    played(folder=tmp_path / "parts", rounds=1)
    parts, _ = played(folder=tmp_path / "parts", rounds=3)
    assert packed_state(parts._state) == packed_state(whole._state)
    assert (tmp_path / "parts" / ROUNDS).read_bytes() == (tmp_path / "whole" / ROUNDS).read_bytes()


@pytest.mark.slow
def test_processes_have_the_same_bytes_and_stacked_clients_the_same_sums_within_rounding():
    one, _ = played()
    two, _ = played(executor="workers", workers=2)
    assert packed_state(one._state) == packed_state(two._state)
    plain, _ = played(executor="stacked", workers=1, secure_sums=None)
    stacked, _ = played(executor="stacked", workers=1)
    for name, tensor in plain._state.weights["all"].items():
        assert_close(stacked._state.weights["all"][name], tensor, rtol=1e-4, atol=1e-4)


def test_what_sums_take_is_in_the_records_and_what_they_replace_is_not(tmp_path):
    _, (record,) = played(folder=tmp_path, rounds=1)
    assert "weights" in record.bytes_down_by_entry
    assert record.bytes_up_by_entry == {"examples": 8 * 7, "secure sums": record.secure["bytes_up"]}
    assert record.bytes_down_by_entry["secure sums"] == record.secure["bytes_down"]
    net = toy_federation(ALIKE).architectures["toy1"]()
    weights = sum(tensor.numel() for tensor in net.parameters())
    assert record.secure["summed"] == weights
    assert record.secure["clients"] == 7
    assert record.secure["bytes_up"] > 7 * 8 * weights  # a word for each number
    costs = [json.loads(line) for line in (tmp_path / COSTS).read_text().splitlines()]
    assert sum(one["bytes_up"] for one in costs) == record.bytes_up
    assert sum(one["bytes_down"] for one in costs) == record.bytes_down


def test_a_run_without_secure_sums_says_nothing_of_them(tmp_path):
    played(folder=tmp_path, rounds=1, secure_sums=None)
    assert "secure" not in json.loads((tmp_path / ROUNDS).read_text())


def test_a_number_that_is_too_large_is_clipped_and_counted():
    run, (record,) = played(rounds=1, secure_sums=SecureRule(largest=0.125))
    assert record.secure["clipped"] > 0
    assert all(float(tensor.abs().max()) <= 0.125 for tensor in run._state.weights["all"].values())


def test_the_run_says_that_it_protects_nobody_here(caplog):
    played(rounds=1)
    assert [one.message for one in caplog.records if "protects nobody" in one.message] == [AddingHere.warning]


DEEP = World(clients=6, architectures=2)


def few_deep(seed):
    """Whether fewer than three of a round's four clients have the deeper network."""
    cohort = RunConfig(cohort_fraction=4 / 6, seed=seed).cohort(range(6), 1)
    return sum(client % 2 for client in cohort) < 3


@pytest.mark.parametrize("few", [True, False])
def test_what_too_few_of_a_cohort_have_stays_as_it_was_and_is_counted(few):
    seed = next(seed for seed in range(99) if few_deep(seed) == few)
    method = quick(get_method("fedavg"))
    run = Run(method, toy_federation(DEEP), RunConfig(rounds=1, cohort_fraction=4 / 6, seed=seed, secure_sums=True))
    before = method.init(run._engine.server(0)).weights["all"]
    (record,) = run.run().rounds
    after = run._state.weights["all"]
    deep = {name for name in before if name.startswith("stages.hidden2")}
    assert deep
    size = sum(before[name].numel() for name in deep)
    assert record.secure["local"] == (size if few else 0)
    assert {name for name in before if torch.equal(before[name], after[name])} == (deep if few else set())


@pytest.mark.parametrize("name", ["fedproto", "fd"])
@pytest.mark.parametrize("labels", [2, 3])
def test_classes_that_too_few_have_are_left_out_and_counted(name, labels):
    method = quick(get_method(name), ["averaged=all"] if name == "fd" else [])
    run, records = played(method, World(clients=4, labels=labels), rounds=2)
    known = labels == 3  # each class at three of four clients, or at two
    assert [(record.secure["summed"] > 0, record.secure["local"] > 0) for record in records] == [(known, not known)] * 2
    state = run._state
    table = method._averages(state, 0, 4) if name == "fd" else state.prototypes
    if name == "fd":
        reported = sum(len(rows["labels"]) for rows in state.reports.values())
        assert reported == (4 * labels if known else 0)
        assert (table is None) or bool(table["known"].all()) == known
    else:
        assert bool(table["known"].any()) == known


@pytest.mark.parametrize(
    ("method", "world", "config", "said"),
    [
        ("fedtgp", ALIKE, {}, "FedTGP needs single replies: its server reads each client's own"),
        ("fd", ALIKE, {}, "FD needs single replies: a client is sent the mean of the others' reports"),
        ("sharing.combine.rule=median", ALIKE, {}, "FedAvg needs single replies: the rule 'median' compares them"),
        ("fedavg", replace(ALIKE, clients=2), {}, "found cohorts of 2 clients; expected 3 to 10,000"),
        ("fedavg", ALIKE, {"cohort_fraction": 0.3}, "found cohorts of 2 clients; expected 3 to 10,000"),
        ("fedavg", ALIKE, {"secure_sums": SecureRule(least=8)}, "found cohorts of 7 clients; expected 8 to 10,000"),
        (
            "fedavg",
            replace(DEEP, clients=5),
            {},
            r"only clients 1, 3 of 5 can train weights/stages.hidden2.0.bias, weights/stages.hidden2.0.weight or",
        ),
        (
            "sharing.scope=architecture",
            replace(DEEP, clients=5),
            {},
            r"only clients 1, 3 of 5 can train toy2/weights/head.bias, .* and 5 more or",
        ),
    ],
)
def test_what_cannot_be_summed_is_refused_in_one_line_before_anything_trains(method, world, config, said):
    subject = quick(get_method("fedavg"), [method]) if "=" in method else quick(get_method(method))
    with pytest.raises(ConfigError, match=r"^run\.secure_sums: ") as caught:
        played(subject, world, **config)
    assert "\n" not in str(caught.value)
    assert re.search(said, str(caught.value))


def test_a_window_that_rolls_is_not_refused_where_few_have_the_whole_net():
    method = quick(get_method("fedrolex"), ["levels=[1.0, 0.5]"])
    _, records = played(method, World(clients=4, architectures=1), rounds=2)  # clients 1 and 3 have a half
    assert [(record.lost, record.secure["local"] > 0) for record in records] == [(None, True)] * 2


def test_a_slice_that_two_clients_have_alone_is_refused():
    method = quick(get_method("heterofl"), ["levels=[1.0, 0.5]"])
    world = World(clients=4, architectures=1)
    with pytest.raises(ConfigError, match=r"only clients 0, 2 of 4 can train weights/.* or a part of it"):
        played(method, world)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"outlier_factor": 100.0}, "outlier_factor: expected 0 with secure_sums"),
        ({"twin": Twin()}, "twin: expected none with secure_sums"),
        ({"rounds_close": RoundsClose(asynchronous=Asynchrony())}, "rounds_close.asynchronous: expected none with"),
    ],
)
def test_settings_that_need_single_replies_are_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        RunConfig(**{"secure_sums": True, **config})


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"least": 2}, "least: expected at least 3"),
        ({"largest": 1e9, "bits": 48}, "largest: expected at most 32 with 48"),
    ],
)
def test_numbers_that_would_not_be_exact_and_sums_of_two_are_refused(rule, said):
    with pytest.raises(ConfigError, match=said):
        SecureRule(**rule)


def test_sums_that_do_not_fit_are_refused_before_anything_trains():
    said = r"found 12 clients that weigh up to 128, numbers up to 2.09715e\+06 and 32 bits .* lower largest"
    with pytest.raises(ConfigError, match=said):
        played(world=replace(ALIKE, clients=12), secure_sums=SecureRule(largest=2.0**21, bits=32))
    assert WORDS == []


def test_true_is_the_default_rule_and_none_leaves_experiments_as_they_were():
    tree = {"method": {"name": "fedavg"}}
    plain, off, on = (resolve({**tree, "run": run}) for run in ({}, {"secure_sums": False}, {"secure_sums": True}))
    assert plain.run.secure_sums is None is off.run.secure_sums
    assert on.run.secure_sums == SecureRule()
    assert "secure_sums" not in plain.toml()
    assert plain.experiment_id == off.experiment_id != on.experiment_id
    again = resolve(on.tree())
    assert again.run == on.run
    table = resolve({**tree, "run": {"secure_sums": {"bits": 20}}})
    assert table.run.secure_sums == SecureRule(bits=20)


def test_without_cryptography_one_line_says_what_to_install(monkeypatch):
    find = running.importlib.util.find_spec
    monkeypatch.setattr(
        running.importlib.util, "find_spec", lambda name: None if name == "cryptography" else find(name)
    )
    with pytest.raises(ConfigError, match=r"^run.secure_sums: cryptography is not installed.*'potluck\[flower\]'$"):
        played()


@pytest.mark.slow
def test_nothing_else_needs_cryptography():
    code = "import sys; sys.modules['cryptography'] = None; import potluck.experiment.running.run, potluck.api.run"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_lies_are_summed_like_everything_else():
    honest, _ = played(rounds=1)
    liars, (record,) = played(rounds=1, attackers=Attackers("sign_flip", clients=(2,), strength=5.0))
    assert record.failed == {}
    name = "head.weight"
    assert not torch.equal(honest._state.weights["all"][name], liars._state.weights["all"][name])


OWN = {
    "dataset": "digits",
    "classes": "own",
    "clients": 8,
    "partition": {"name": "pathological", "classes": 6},
    "train_fraction": 0.3,
    "models": ["mlp3"],
}


@dataclass(frozen=True)
class AveragesOfAll:
    """What FD makes of its state, which has clients' reports."""

    table: dict


def own(name, secure, classes=6, **method):
    """The state after a round of clients that have outputs for their own classes alone, and its record."""
    federation = {**OWN, "partition": {"name": "pathological", "classes": classes}, "capacities": [1.0]}
    tree = {"method": {"name": name, **method}, "federation": federation, "run": {"rounds": 1, "secure_sums": secure}}
    experiment = resolve(tree)
    run = Run(experiment.method, assemble(experiment).federation, experiment.run)
    (record,) = run.run().rounds
    state = run._state
    return (AveragesOfAll(experiment.method._averages(state, 0, 10)) if name == "fd" else state), record


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "lgfedavg", "heterofl", "fjord", "depthfl", "fedproto", "fd"])
def test_rows_of_clients_own_classes_are_summed_over_those_who_have_them(name):
    more = {"averaged": "all", "classes": 9} if name == "fd" else {}  # it needs three for each two classes
    (plain, _), (secure, record) = (own(name, one, **more) for one in (False, True))
    assert record.secure["summed"] > 0
    assert record.secure["local"] == 0
    for (path, tensor), (_, other) in zip(unpacked_state(plain), unpacked_state(secure), strict=True):
        assert_close(other, tensor, rtol=1e-4, atol=1e-4, msg=lambda text, path=path: f"{path}: {text}")


def unpacked_state(state):
    return [
        (f"{spec.name}.{name}", tensor)
        for spec in fields(state)
        for name, tensor in flat(getattr(state, spec.name), "").items()
    ]


def flat(value, where):
    if isinstance(value, torch.Tensor):
        return {where: value}
    inner = value.items() if isinstance(value, dict) else ()
    return {path: tensor for name, child in inner for path, tensor in flat(child, f"{where}.{name}").items()}


@pytest.mark.slow
def test_rows_of_classes_that_too_few_have_are_not_refused_but_counted():
    _, record = own("fedavg", True, classes=2)  # of ten, by eight clients
    assert record.secure["local"] > 0


@dataclass(frozen=True)
class Alone(FedAvg):
    """Notes of whom it knows when it says what is summed."""

    def summed(self, handler, member, message, reply, server):
        GIVEN.append((member.id, [*server.roster]))
        return super().summed(handler, member, message, reply, server)


def test_what_is_summed_of_a_reply_follows_from_what_its_client_knows():
    played(replace(Alone(), training=FEDAVG.training), replace(ALIKE, clients=4), rounds=1)
    assert {client for client, _ in GIVEN} == {0, 1, 2, 3}
    assert all(known == [client] for client, known in GIVEN)


@pytest.mark.slow
def test_the_report_has_a_line_for_what_sums_took(tmp_path):
    federation = {"dataset": "digits", "clients": 4, "models": ["mlp2"], "partition": "iid", "train_fraction": 0.2}
    run = {"rounds": 1, "executor": "sequential", "secure_sums": True}
    carried_out(tmp_path, {"federation": federation, "method": {"name": "fedavg"}, "run": run})
    assert re.search(r"^\| secure sums \| [\d.]+ \| [\d.]+ \|$", report_text([read_run(tmp_path)]), re.MULTILINE)
    tables = resolve(read_toml(tmp_path / CONFIG)).tree()
    assert tables["run"]["secure_sums"] == {"largest": 64.0, "bits": 24, "least": 3}
