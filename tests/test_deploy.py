"""The deployment kit and the guides name commands that there are, and files that can be read."""

import configparser
import re
import shlex
import textwrap
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer.main

from potluck.cli.commands import app
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.tables import read_toml

ROOT = Path(__file__).parents[1]
KIT = ROOT / "deploy"
COMPOSED = ("compose.yaml", "compose-node.yaml")


def commands():
    """Every `potluck ...` line of guides and kit, as (where, words)."""
    docs = ROOT / "docs"
    written = sorted(page for page in docs.rglob("*.md") if not page.is_relative_to(docs / "_build"))
    for page in [ROOT / "README.md", *written]:
        for block in re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if "potluck" in words[:2]:
                    yield page.name, words[words.index("potluck") + 1 :]
    for unit in sorted(KIT.glob("*.service")):
        yield unit.name, shlex.split(read(unit)["Service"]["ExecStart"])[1:]
    for file in COMPOSED:
        for name, service in compose(file)["services"].items():
            if service["image"] == "potluck":
                yield f"{file} {name}", shlex.split(service["command"])


def read(unit):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(unit)
    return parser


def compose(file):
    return pytest.importorskip("yaml").safe_load((KIT / file).read_text())


@pytest.mark.parametrize(
    ("where", "words"), [pytest.param(*found, id=f"{found[0]}-{found[1][0]}") for found in commands()]
)
def test_commands_can_be_given_so(where, words):
    command = typer.main.get_command(app).get_command(None, words[0])
    assert command is not None, f"{where}: potluck {words[0]}"
    command.make_context(words[0], words[1:])


def test_a_service_may_write_where_it_works():
    for unit in KIT.glob("*.service"):
        service = read(unit)["Service"]
        assert service["ReadWritePaths"] == service["WorkingDirectory"]
        assert service["WorkingDirectory"] in service["ExecStart"]


@pytest.mark.parametrize("file", COMPOSED)
def test_a_service_that_composes_has_all_its_volumes_and_networks(file):
    found = compose(file)
    for service in found["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in found["volumes"] or source.startswith("./")
        assert set(service["networks"]) <= found["networks"].keys()


@pytest.mark.parametrize("file", COMPOSED)
def test_a_node_in_a_container_has_no_privileges_writes_its_state_alone_and_reaches_the_server_alone(file):
    found = compose(file)
    inside = {name for name, network in found["networks"].items() if (network or {}).get("internal")}
    outer = {name: service for name, service in found["services"].items() if not set(service["networks"]) <= inside}
    nodes = [service for service in found["services"].values() if service["command"].startswith("join ")]
    assert nodes
    for node in nodes:
        assert set(node["networks"]) <= inside
        assert not {"ports", "privileged", "cap_add", "network_mode", "devices", "pid", "ipc"} & node.keys()
        assert (node["user"], node["read_only"], node["cap_drop"]) == ("1000:1000", True, ["ALL"])
        assert node["security_opt"] == ["no-new-privileges:true"]
        assert node["mem_limit"]
        assert node["pids_limit"]
        words = shlex.split(node["command"])
        written = [volume for volume in node["volumes"] if not volume.endswith(":ro")]
        assert [volume.split(":")[1] for volume in written] == [words[words.index("--state") + 1]]
    (way_out,) = outer.values()  # the server itself, or what passes connections on to it
    host = words[1].partition(":")[0]
    if way_out["command"].startswith("serve "):
        assert found["services"][host] is way_out
    else:
        assert way_out["command"] == "TCP-LISTEN:8443,fork,reuseaddr TCP:192.0.2.10:8443"
        assert way_out["networks"]["inside"]["aliases"] == [host]
    assert way_out["cap_drop"] == ["ALL"]


def test_the_image_is_installed_as_what_is_listed_and_audited():
    lines = [*(KIT / "Containerfile").read_text().splitlines(), *(ROOT / "Makefile").read_text().splitlines()]
    listed = [line for line in lines if ".[flower]" in line]
    assert len(listed) == 2
    assert "-c constraints.txt" in listed[0]
    assert "$(subst .venv/,.venv-image/,$(INSTALL))" in listed[1]
    assert any("pip-audit --strict" in line for line in lines), "what is not known must not count as sound"
    assert any(line.startswith("INSTALL :=") and "-c constraints.txt" in line for line in lines)
    assert any(line.startswith("USER potluck") for line in lines)


def test_the_unit_of_a_node_reaches_its_server_alone():
    service = read(KIT / "potluck-join.service")["Service"]
    assert (service["IPAddressDeny"], service["IPAddressAllow"]) == ("any", "localhost 192.0.2.10")


def test_the_federation_of_the_kit_is_one():
    assert resolve(read_toml(KIT / "federation.toml")).federation.clients == 3


def tables_of_the_guide():
    """The federation and the policy that the guide shows."""
    page = (ROOT / "docs/guides/across-machines.md").read_text()
    return [textwrap.dedent(block) for block in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)]


def test_the_guides_policy_is_one(tmp_path):
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from potluck.flower.node.policy import Policy

    (tmp_path / "policy.toml").write_text(tables_of_the_guide()[1])
    policy = Policy.read(tmp_path / "policy.toml")
    assert all(getattr(policy, spec.name) != spec.default for spec in fields(Policy)), "it shows every line"


def test_the_guides_federation_is_that_of_the_kit():
    shown, _ = tables_of_the_guide()
    assert shown == (KIT / "federation.toml").read_text()


def test_alerts_name_numbers_that_there_are():
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    parser = pytest.importorskip("prometheus_client.parser")
    from potluck.cli.status.account import Account
    from potluck.cli.status.metrics import metrics_of
    from potluck.cli.status.overview import NODE_STATES, NodeStanding
    from potluck.flower.deploy.sightings import Sighting

    found = pytest.importorskip("yaml").safe_load((KIT / "alerts.yml").read_text())
    rules = [rule for group in found["groups"] for rule in group["rules"]]
    assert all({"alert", "expr", "annotations"} <= rule.keys() for rule in rules)
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    node = NodeStanding("a", 0, "idle", "waits", sighting=Sighting())
    seen = replace(Account(None).look(), nodes=(node,), disk=1, free=1, ends={"ca.crt": datetime.now(UTC)})
    families = parser.text_string_to_metric_families(metrics_of(seen).decode())
    names = {sample.name for family in families for sample in family.samples}
    named = {name for rule in rules for name in re.findall(r"\bpotluck_\w+", rule["expr"])}
    assert len(named) > 7
    assert not named - names
    states = {state for rule in rules for state in re.findall(r'state="([^"]*)"', rule["expr"])}
    assert states
    assert states <= set(NODE_STATES)


def test_the_servers_unit_opens_its_page_for_its_own_machine():
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from potluck.cli.status.serving import is_loopback

    words = shlex.split(read(KIT / "potluck-serve.service")["Service"]["ExecStart"])
    assert is_loopback(words[words.index("--status") + 1].rpartition(":")[0])
