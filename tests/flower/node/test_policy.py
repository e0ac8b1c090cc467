"""What a node's owner lets servers ask, and what the audit log has of what they asked."""

import json

import pytest

from potluck.core.ground.errors import CheckpointError, ConfigError
from potluck.core.ground.rng import fold_in
from potluck.core.ground.tree import pack
from potluck.engine.client.runtime import EvalRequest
from potluck.engine.client.session import Call
from potluck.flower import HELLO, JOB
from potluck.flower.node.audit import Audit, in_words, last_digest
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.policy import Policy, Tally
from potluck.flower.node.service import NodeService
from potluck.flower.wire.schemas import from_job
from potluck.models import get_model


def policy(place, text):
    (place / "policy.toml").write_text(text)
    return place / "policy.toml"


def header(method="fedavg", run="run-1", **settings):
    federation = {"dataset": "digits", "train_fraction": 0.1, "clients": 2, "models": [{"name": "cnn2", "width": 4}]}
    return {
        "experiment": {"federation": federation, "method": {"name": method, **settings}},
        "run": run,
        "client": 0,
        "classes": {"count": 10, "names": None},
    }


def met(place, text, **asked):
    """A service with this policy, and its answer to a server that asks for something."""
    service = NodeService(NodeConfig(place / "state", policy=policy(place, text)))
    return service, service.answer(HELLO, (header(**asked), b""))[0]


def trained(service, round_number, run="run-1"):
    """The answer to a round's job, as FedAvg's server sends it."""
    tensors = get_model("cnn2")(10, (1, 8, 8), width=4).state_dict()
    buffers = {name: tensor for name, tensor in tensors.items() if "running" in name or "batches" in name}
    learnt = {name: tensor for name, tensor in tensors.items() if name not in buffers}
    key = fold_in(0, "round", round_number, "client", 0)
    job = Call("local_update", 0, pack({"weights": learnt, "buffers": buffers}), None, key, round_number)
    return service.answer(JOB, from_job(job, header(run=run)))


@pytest.mark.parametrize(
    ("text", "asked", "words"),
    [
        ('methods = ["fedprox", "fedin"]', {}, "refuses the method fedavg; it allows one of fedprox, fedin"),
        (
            'settings = {"method.training.epochs" = {most = 2}}',
            {"training": {"epochs": 3}},
            "epochs = 3; it allows at most 2",
        ),
        ('settings = {"method.training.optimizer" = ["sgd"]}', {}, "'adam'; it allows one of 'sgd'"),
        ('settings = {"federation.dataset" = "mnist"}', {}, "it allows 'mnist'"),
        ("least_batch = 8", {"training": {"batch_size": 4}}, "training.batch_size = 4; it allows at least 8"),
        ("least_batch = 8", {"method": "fedin", "feature_batch": 2}, "feature_batch = 2; it allows at least 8"),
        ("least_batch = 80", {"training": {"batch_size": 100}}, "training examples; it allows at least 80"),
        ('privacy = "required"', {"method": "fedin"}, "fedin, whose features do not leave clipped"),
        (
            'settings = {"run.private_weights.noise_multiplier" = {least = 1.0}}',
            {},
            "refuses an experiment without run.private_weights; it allows a run.private_weights.noise_multiplier that"
            " is at least 1.0",
        ),
        (
            'settings = {"method.privacy.epsilon" = {most = 1.0}}',
            {"method": "fedin"},
            "refuses an experiment without method.privacy; it allows a method.privacy.epsilon that is at most 1.0",
        ),
    ],
)
def test_policy_refuses_what_the_owner_does_not_allow(tmp_path, text, asked, words):
    service, said = met(tmp_path, text, **asked)
    job, _ = service.answer(JOB, from_job(EvalRequest(0, b"", None, (), 1), header(**asked)))
    for refusal in (said["refusal"], job["failure"]["reason"]):
        assert "the policy of this node's owner refuses" in refusal
        assert words in refusal


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", {}),
        ('methods = ["fedavg"]', {}),
        ('settings = {"method.training.epochs" = {most = 2}, "method.noise" = 0.0}', {"training": {"epochs": 2}}),
        ("least_batch = 4", {"training": {"batch_size": 4}}),
        ('settings = {"method.privacy.epsilon" = {most = 1.0}}', {}),  # FedAvg has no such table
        ('privacy = "required"', {"method": "fedin", "privacy": {"clip": 1.0, "epsilon": 1.0, "delta": 1e-5}}),
    ],
)
def test_policy_lets_pass_what_the_owner_allows(tmp_path, text, asked):
    assert "refusal" not in met(tmp_path, text, **asked)[1]


def test_policy_counts_rounds_of_all_runs_whatever_the_server_calls_them(tmp_path):
    service, _ = met(tmp_path, "rounds = 2")
    assert "answer" in trained(service, 1)[0]
    assert "answer" in trained(service, 1)[0]
    assert "answer" in trained(service, 2)[0]
    for run, number in (("run-1", 3), ("run-1", 1), ("another", 2)):
        assert "refuses one more round" in trained(service, number, run)[0]["failure"]["reason"]
    again = NodeService(service._config)  # a restart does not make it forget
    assert "refuses one more round" in trained(again, 3)[0]["failure"]["reason"]


def test_policy_lets_no_more_bytes_leave_in_a_round_however_often_they_are_asked_for(tmp_path):
    service, _ = met(tmp_path, "rounds = 9")
    said, payload = trained(service, 1)
    size = len(payload) + len(json.dumps(said))
    service = NodeService(NodeConfig(tmp_path / "other", policy=policy(tmp_path, f"bytes_a_round = {2 * size + 9}")))
    assert [bool(trained(service, 1)[1]) for _ in range(3)] == [True, True, False]
    assert "after" in trained(service, 1)[0]["failure"]["reason"]
    assert trained(service, 2)[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("method = 3", "policy.method"),
        ('settings = {"method.training.epoch" = 1}', "nearest: method.training.epochs"),
        ('settings = {"run.rounds" = {atmost = 1}}', "`least` and `most`"),
        ("rounds = 0", "rounds"),
        ('privacy = "yes"', "privacy"),
    ],
)
def test_policy_that_speaks_of_what_there_is_not_is_refused_before_anything_starts(tmp_path, text, words):
    with pytest.raises(ConfigError, match=r"policy\.toml") as refused:
        NodeConfig(tmp_path, policy=policy(tmp_path, text)).check()
    assert words in str(refused.value)


def test_a_tally_that_is_damaged_is_not_taken_for_none(tmp_path):
    (tmp_path / "tally.json").write_text("[1")
    with pytest.raises(CheckpointError, match="damaged"):
        Tally(tmp_path / "tally.json", Policy())


def test_the_audit_log_has_every_request_with_what_left(tmp_path):
    service, _ = met(tmp_path, 'methods = ["fedavg"]')
    said, payload = trained(service, 1)
    service.answer(HELLO, (header("fedprox"), b""))
    lines = (tmp_path / "state" / "audit.jsonl").read_text().splitlines()
    hello, job, refused = map(json.loads, lines)
    assert hello["settings"]["method"]["name"] == hello["method"] == "fedavg"
    assert (job["asked"], job["round"], job["bytes"]) == ("local_update", 1, len(payload) + len(json.dumps(said)))
    assert job["left"].keys() == {"header", "weights", "buffers", "examples"}
    assert job["left"]["weights"] > job["left"]["buffers"] > 0
    assert 0 < job["seconds"] < 60
    assert "refuses the method fedprox" in refused["refused"]
    assert "asked to compute fedavg on digits" in in_words(lines[0])
    assert in_words(lines[1]) is None
    assert "refuses the method fedprox" in in_words(lines[2])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: lines[1:],
        lambda lines: [lines[1], lines[0]],
        lambda lines: [lines[0], lines[1].replace("one", "two"), lines[2]],
    ],
)
def test_the_audit_log_shows_that_a_line_was_changed(tmp_path, spoil):
    place = tmp_path / "audit.jsonl"
    for _ in range(2):  # it is continued
        log = Audit(place)
        log.note({"what": "one"})
        log.note({"what": "one"})
    assert len(place.read_text().splitlines()) == 4
    assert last_digest(place) == log._last
    place.write_text("".join(f"{line}\n" for line in spoil(place.read_text().splitlines())))
    with pytest.raises(CheckpointError, match="was changed or torn"):
        Audit(place)
