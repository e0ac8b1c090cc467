"""What `keys`, `serve`, `join` and `simulate` refuse, in one line, before anything starts; a server interrupted."""

import signal
import subprocess
import sys

import pytest

from potluck.cli import main


def outcome(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["potluck", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr()


@pytest.mark.parametrize("command", [["keys"], ["serve", "--insecure"], ["join", "x:1", "--insecure"], ["simulate"]])
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
            (["serve", "nothing.toml", "--insecure"], "nothing.toml"),
            (["serve", "--insecure", "run.round=3"], "nearest"),
            (["join", "somewhere", "--insecure"], "expected HOST:PORT"),
            (["join", "x:1", "--keys", "k"], "k: ca.crt, node.key not found"),
            (["join", "x:1", "--insecure", "--model", "cnn2"], "--model and --capacity need --data"),
            (["join", "x:1", "--insecure", "--data", "none.npz"], "none.npz: no such file"),
            (["join", "x:1", "--insecure", "--state", "x" * 120], "characters long"),
            (["keys", "--address", "a:1"], "without port"),
            (["simulate", "--engine", "steam"], "expected flower"),
        ],
    )
    def test_what_cannot_work_is_refused_in_a_line(self, words, expected, monkeypatch, capsys, tmp_path):
        before = signal.getsignal(signal.SIGTERM)
        code, said = outcome(monkeypatch, capsys, *words)
        assert code == 2
        assert expected in said.err.splitlines()[-1]
        assert signal.getsignal(signal.SIGTERM) is before
        assert list(tmp_path.rglob("*")) == []

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

    @pytest.mark.slow
    def test_an_interrupted_server_says_how_to_go_on_and_that_works(self, tmp_path):
        from potluck.flower.deploy.processes import free_port

        heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        command = [sys.executable, "-c", f"{heard}; from potluck.cli import main; main()", "serve", "--insecure"]
        words = ["fedavg", "federation.clients=2", "federation.models=['cnn2']"]
        for _ in range(2):
            listen = ["--listen", f"127.0.0.1:{free_port()}"]
            server = subprocess.Popen([*command, *listen, *words], stderr=subprocess.PIPE, text=True)
            try:
                assert any("nodes join by" in line for line in iter(server.stderr.readline, ""))
                server.send_signal(signal.SIGINT)
                _, err = server.communicate()
            finally:
                server.kill()
            assert server.returncode == 130
            (folder,) = (tmp_path / "runs").iterdir()
            words = ["--folder", str(folder.relative_to(tmp_path))]
            assert err.splitlines()[-1] == f"potluck: interrupted; resume with: potluck serve {' '.join(words)}"
            assert "Traceback" not in err
