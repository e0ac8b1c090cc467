"""What `keys`, `serve` and `join` refuse, in one line, before anything starts."""

import re
import signal
import sys

import pytest

from potluck.cli import main
from potluck.core.ground.errors import ConfigError
from potluck.experiment.settings.schema import RoundsClose
from potluck.records import CONFIG


def outcome(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["potluck", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr()


@pytest.mark.parametrize("command", [["keys"], ["serve", "--insecure"], ["join", "x:1", "--insecure"]])
def test_without_flower_it_says_what_to_install(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, said = outcome(monkeypatch, capsys, *command)
    assert code == 2
    assert said.err.splitlines()[-1].endswith("pip install 'potluck[flower]'")
    assert list(tmp_path.iterdir()) == []


class TestWithFlower:
    """Where it is installed."""

    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch, tmp_path):
        pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["serve"], "give --keys FOLDER"),
            (["serve", "--keys", "k", "--insecure"], "give --keys FOLDER"),
            (["serve", "--keys", "k"], "k: ca.crt, server.crt, server.key not found"),
            (["serve", "--insecure", "--listen", "8443"], "expected HOST:PORT"),
            (["serve", "--insecure", "--status", "8600"], "expected HOST:PORT"),
            pytest.param(
                ["serve", "--insecure", "--status", "192.0.2.1:8600"],
                "--status 192.0.2.1:8600: cannot listen there",
                marks=pytest.mark.slow,
            ),
            (["serve", "nothing.toml", "--insecure"], "nothing.toml"),
            (["serve", "--insecure", "run.round=3"], "nearest"),
            (
                ["serve", "--insecure", "run.rounds_close.quorum=11"],
                "quorum: expected at most the 10 of a cohort, found 11",
            ),
            (
                [
                    "serve",
                    "fedin",
                    "--insecure",
                    "federation.models=['cnn2']",
                    "run.rounds_close.asynchronous.rule=fedasync",
                ],
                "FedIN cannot have it: its messages differ from round to round (features)",
            ),
            (
                ["serve", "fedtgp", "--insecure", "run.secure_sums=true"],
                "run.secure_sums: FedTGP needs single replies: its server reads each client's own",
            ),
            (["serve", "--insecure", "run.rounds_close.deadline=5"], "nearest: run.rounds_close.deadline_s"),
            (["serve", "--insecure", "--timeout", "1800"], "settings are keys: run.rounds_close.deadline_s=1800"),
            (["serve", "--insecure", "--patience", "60"], "settings are keys: run.rounds_close.patience_s=60"),
            (["join", "somewhere", "--insecure"], "expected HOST:PORT"),
            (["join", "x:1", "--keys", "k"], "k: ca.crt, node.key not found"),
            (["join", "x:1", "--insecure", "--model", "cnn2"], "--model and --capacity need --data"),
            (["join", "x:1", "--insecure", "--data", "none.npz"], "none.npz: no such file"),
            (["join", "x:1", "--insecure", "--state", "x" * 120], "bytes; expected at most"),
            (
                ["serve", "--insecure", "--log-json", "none/log"],
                "--log-json none/log: No such file or directory; name a file",
            ),
            (["join", "x:1", "--insecure", "--log-json", "/dev/null"], "no file that lines can be appended to"),
            (["keys", "--address", "a:1"], "without port"),
            (["keys", "--days", "-1"], "--days -1: expected a number from 1 to 3650"),
        ],
    )
    def test_what_cannot_work_is_refused_in_a_line(self, words, expected, monkeypatch, capsys, tmp_path):
        before = signal.getsignal(signal.SIGTERM)
        code, said = outcome(monkeypatch, capsys, *words)
        assert code == 2
        assert expected in said.err.splitlines()[-1]
        assert signal.getsignal(signal.SIGTERM) is before
        assert list(tmp_path.rglob("*")) == []

    def test_a_server_whose_certificate_has_expired_does_not_start(self, days_ago, monkeypatch, capsys, tmp_path):
        with days_ago(366):
            outcome(monkeypatch, capsys, "keys")
        code, said = outcome(monkeypatch, capsys, "serve", "--keys", "keys")
        assert code == 2
        assert "keys/server.crt expired on" in said.err.splitlines()[-1]
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize(("words", "largest"), [([], 2**32), (["--largest-reply", "0.5"], 2**29)])
    def test_the_gate_knows_how_large_a_reply_may_be(self, words, largest, monkeypatch, capsys):
        opened = []

        class Link:
            def __init__(self, *settings):
                self.address, self.trust = "127.0.0.1:1", None

            def __enter__(self):
                return self

            def __exit__(self, *error):
                pass

            def register(self):
                return []

        def gate(*settings, mutual):
            opened.append(settings[-1])
            raise ConfigError("no more than this is of interest")

        monkeypatch.setattr("potluck.flower.deploy.superlink.SuperLink", Link)
        monkeypatch.setattr("potluck.flower.deploy.gate.Gate", gate)
        assert outcome(monkeypatch, capsys, "serve", "fedavg", "--insecure", *words)[0] == 2
        assert opened == [largest]

    def test_keys_say_where_they_belong(self, monkeypatch, capsys, tmp_path):
        code, said = outcome(monkeypatch, capsys, "keys", "--address", "fl.example.org", "--node", "a")
        assert code == 0
        assert said.out.splitlines() == [
            "keys: for the server, reachable as fl.example.org, localhost; keep it there",
            "keys/nodes/a: copy it to a, then delete it here",
        ]
        code, said = outcome(monkeypatch, capsys, "keys", "--revoke", "a")
        assert (code, said.out) == (0, "a is revoked\n")
        assert not (tmp_path / "keys/registered/a.pub").exists()

    def test_keys_are_renewed_in_the_same_style_and_listed_alone(self, monkeypatch, capsys, tmp_path):
        day, likewise = r"\d{4}-\d\d-\d\d", r"keys/nodes/NAME/node\.crt: copy it likewise to a"
        outcome(monkeypatch, capsys, "keys", "--node", "a")
        for words, expected in (
            (
                ["--renew", "a"],
                rf"keys/nodes/a: copy it to a before {day}, when its former key ends, then delete it here",
            ),
            (["--renew-server"], rf"keys/server\.crt ends on {day}; a running server takes it up by itself"),
            (
                ["--renew-authority"],
                rf"keys/ca\.crt ends on {day}: copy it to each node before its own one ends\n{likewise}",
            ),
            (
                ["--change-authority"],
                rf"keys/ca\.crt is another authority's: copy it to each node before {day}\n{likewise}",
            ),
        ):
            code, said = outcome(monkeypatch, capsys, "keys", *words)
            assert code == 0
            assert re.fullmatch(f"{expected}\n", said.out), said.out
        code, said = outcome(monkeypatch, capsys, "keys", "keys")
        assert code == 0
        assert [line.partition(":")[0] for line in said.out.splitlines()] == [
            "authority",
            "a former authority",
            "server",
            "node a",
        ]

    def test_observers_are_renewed_revoked_and_listed_by_the_same_words_as_nodes(self, monkeypatch, capsys):
        day = r"\d{4}-\d\d-\d\d"
        for words, expected in (
            (["--node", "a"], "keys: for the server, .*\nkeys/nodes/a: copy it to a, then delete it here"),
            (["--observer", "board", "--days", "9"], "keys/observers/board: copy it to board, then delete it here"),
            (
                ["--renew", "board"],
                rf"keys/observers/board: copy it to board before {day}, when its former key ends, then delete it here",
            ),
            (["--change-authority"], ".*\n.*\nkeys/observers/NAME/observer.crt: copy it likewise to board"),
            ([], rf"(.*\n)*node a: no end\nobserver board: ends on {day}; its former key ends on {day}, or when .*"),
            (["--revoke", "board"], "board is revoked"),
            ([], rf"(.*\n)*node a: no end\nobserver board: revoked on {day}"),
        ):
            code, said = outcome(monkeypatch, capsys, "keys", "keys", *words)
            assert code == 0, said
            assert re.fullmatch(f"{expected}\n", said.out), (words, said.out)

    @pytest.mark.parametrize("words", [["--observers", "127.0.0.1:8601"], ["--mutual-tls"]])
    @pytest.mark.parametrize("more", [["--insecure"], ["--keys", "k", "--superlink", "127.0.0.1:1"]])
    def test_what_wants_certificates_is_refused_where_there_are_none(self, words, more, monkeypatch, capsys):
        code, said = outcome(monkeypatch, capsys, "serve", "fedavg", *words, *more)
        assert code == 2
        assert f"{words[0]}: callers are known by certificates of `potluck keys`; give --keys FOLDER" in said.err

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["--renew", "b"], "keys has no node b; registered: a"),
            (["--observer", "a"], "node a has a key; renew it, or revoke a before it gets another one"),
            (["--observer", "../a"], "expected up to 64 letters"),
            (["--observer", "b", "--days", "0"], "--days 0: expected a number from 1 to 3650"),
            (["--renew", "a", "--overlap", "400"], "--overlap 400: expected a number of days from 0 to 365"),
            (["--renew-authority", "--change-authority"], "give one; the same authority, or another one"),
        ],
    )
    def test_what_cannot_be_renewed_is_refused_and_changes_nothing(
        self, words, expected, monkeypatch, capsys, tmp_path
    ):
        outcome(monkeypatch, capsys, "keys", "--node", "a")
        before = {path: path.read_bytes() for path in (tmp_path / "keys").rglob("*") if path.suffix in (".crt", ".pub")}
        code, said = outcome(monkeypatch, capsys, "keys", *words)
        assert code == 2
        assert expected in said.err.splitlines()[-1]
        assert {path: path.read_bytes() for path in before} == before

    def test_a_server_and_a_node_do_not_start_with_what_others_may_read(self, monkeypatch, capsys, tmp_path):
        outcome(monkeypatch, capsys, "keys", "--node", "a")
        for secret, words in (
            ("keys/nodes/a/node.key", ["join", "127.0.0.1:1", "--keys", "keys/nodes/a", "--state", "state"]),
            ("keys/server.key", ["serve", "fedavg", "--keys", "keys"]),
        ):
            (tmp_path / secret).chmod(0o644)
            code, said = outcome(monkeypatch, capsys, *words)
            assert code == 2
            assert "others may read this secret key (mode 644)" in said.err
            assert f"chmod 600 {secret}\n" in said.err
            (tmp_path / secret).chmod(0o600)
        assert not (tmp_path / "runs").exists()

    def test_a_node_whose_authority_has_ended_does_not_start(self, days_ago, monkeypatch, capsys, tmp_path):
        with days_ago(3651):
            outcome(monkeypatch, capsys, "keys", "--node", "a")
        code, said = outcome(monkeypatch, capsys, "join", "127.0.0.1:1", "--keys", "keys/nodes/a", "--state", "state")
        assert code == 2
        assert "keys/nodes/a/ca.crt expired on" in said.err
        assert "--renew-authority" in said.err

    def test_a_served_run_is_resumed_with_other_rules_for_its_rounds_and_no_other_method(self, tmp_path):
        from potluck.cli.flower import _experiment

        run, words = tmp_path / "run", ["federation.clients=3", "method.sharing.weighting=uniform"]
        run.mkdir()
        started = _experiment("fedavg", words, run)
        (run / CONFIG).write_text(started.toml())
        later = _experiment(None, ["run.rounds_close.quorum=2", "run.rounds_close.deadline_s=5", "run.rounds=30"], run)
        assert (later.run.rounds_close, later.run.rounds) == (RoundsClose(quorum=2, deadline_s=5.0), 30)
        assert later.method == started.method
        assert later.run.tolerate_failures
        again = _experiment("fedavg", [*words, "run.rounds_close.quorum=3"], run)
        assert again.run.rounds_close == RoundsClose(quorum=3)
        with pytest.raises(ConfigError, match=r"run\.seed=1; a run is resumed with its own configuration"):
            _experiment(None, ["run.seed=1"], run)
        with pytest.raises(ConfigError, match="was started with another configuration"):
            _experiment("fedavg", ["federation.clients=3"], run)

    @pytest.mark.parametrize(
        ("said", "expected"),
        [([], (True, 100.0)), (["run.outlier_factor=0"], (True, 0)), (["run.tolerate_failures=false"], (False, 100.0))],
    )
    def test_what_is_served_compares_replies_and_tolerates_failures_unless_told_otherwise(self, said, expected):
        from potluck.cli.flower import _experiment

        run = _experiment("local", said, None).run
        assert (run.tolerate_failures, run.outlier_factor) == expected

    def test_what_holds_of_a_served_run_is_in_its_configuration(self, tmp_path):
        from potluck.cli.flower import _experiment

        (tmp_path / "file.toml").write_text('[method]\nname = "local"\n[run]\noutlier_factor = 20\n')
        asked = _experiment(str(tmp_path / "file.toml"), [], None)
        assert asked.run.outlier_factor == 20
        assert "outlier_factor = 20" in asked.toml()
        asked = _experiment("local", [], None)
        (tmp_path / "config.toml").write_text(asked.toml())
        assert _experiment(None, [], tmp_path).tree() == asked.tree()
