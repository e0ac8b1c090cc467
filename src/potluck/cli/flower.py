"""`potluck serve` and `join`: runs with clients on other machines."""

import importlib.util
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from potluck.analysis.read import read_run
from potluck.cli.display import Display, print_result
from potluck.cli.jsonlog import JsonLog
from potluck.core.ground.errors import ConfigError
from potluck.experiment.federation.assemble import assemble_server, common_classes, task_of
from potluck.experiment.folder.folder import new_folder
from potluck.experiment.results.evaluate import Evaluation
from potluck.experiment.results.result import Result
from potluck.experiment.running.again import check_free
from potluck.experiment.running.asynchrony import check_asynchronous_nodes
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.tables import override, read_toml
from potluck.experiment.watching.observers import RunStart
from potluck.records import CHECKPOINT, CONFIG, LAST, Checkpoint, Progress, RoundRecord
from potluck.seals import differences, what_matters

if TYPE_CHECKING:
    from potluck.cli.status.account import Account
    from potluck.flower.server.hosting import NodeRefused

_SERVED = {"tolerate_failures": "true"}
"""What holds of `run` if nothing else is said: nodes may fail,"""

_COMPARED = {"outlier_factor": "100"}
"""and may lie, which shows where replies can be compared."""


def require_flower() -> None:
    """Check that Flower is installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("Flower is not installed, which carries runs across machines: pip install 'potluck[flower]'")


def host(
    target: str | None,
    assignments: Sequence[str],
    *,
    parent: Path,
    folder: Path | None,
    address: str,
    keys: Path | None,
    superlink: str | None,
    largest_reply: float,
    status: str | None,
    observers: str | None,
    mutual_tls: bool,
    allow_versions: bool,
    log: JsonLog,
) -> None:
    """Serve a run until it ends.

    Args:
        target: a TOML file or a method, as for `potluck run`.
        assignments: dotted keys; of a run that was started before, those that may change.
        parent: the folder in which a new run's folder is made.
        folder: the run's folder, resumed if it was started before; None for a new one.
        address: the `host:port` to listen at for nodes.
        keys: the folder of `potluck keys`; None for no encryption.
        superlink: the address of a running one; None starts one behind a gate.
        largest_reply: the most GiB of one reply of a node.
        status: the `host:port` of a page for the operator, see `potluck.cli.status`; None for none.
        observers: the `host:port` of what of that page is for observers; None for none.
        mutual_tls: whether nodes have to show their certificates before anything of theirs is read.
        allow_versions: whether nodes with another version of Potluck or another copy of the method may take part.
        log: has a line for each that is said.

    Raises:
        ConfigError: something is missing, or the experiment cannot be run.
        FlowerError: Flower failed.
        typer.Exit: it was interrupted; with 128 plus the signal's number, as in shells.
    """
    from potluck.cli.status.account import Account
    from potluck.experiment.running.secure_sums import check_sums_suffice
    from potluck.flower.deploy.checks import check_served
    from potluck.flower.deploy.gate import Gate
    from potluck.flower.deploy.processes import private_folder
    from potluck.flower.deploy.superlink import SuperLink
    from potluck.flower.server.hosting import run_app, write_app
    from potluck.flower.server.serve import NODES
    from potluck.flower.wire.classes import told

    served_keys = _keys_served(keys if superlink is None else None, observers, mutual_tls=mutual_tls)
    console, account = Console(stderr=True), Account(served_keys)
    place, largest = _address(address), int(largest_reply * 2**30)
    for page in filter(None, (status, observers)):
        _address(page)
    if served_keys is not None:
        check_served(served_keys)
    if keys is None and folder is not None and (folder / NODES).is_file():
        raise ConfigError(f"{folder}: nodes without keys have no names by which to recognise them; start a new run")
    experiment = _experiment(target, assignments, folder)
    matched = common_classes(experiment)
    base = assemble_server(experiment, matched)  # errors are reported before anything starts
    if experiment.run.rounds_close.asynchronous and not (folder is not None and (folder / NODES).is_file()):
        check_asynchronous_nodes(experiment, base)
    if experiment.run.secure_sums is not None:
        check_sums_suffice(experiment.method)
    told(matched)

    def say(line: str, event: str = "server") -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        log.note(line.removeprefix("potluck: "), event)

    def report(event: str) -> Callable[[str], None]:
        def heard(line: str) -> None:
            if not line.startswith("warning: "):  # these name paths of ours, and the page shows what ends
                account.hear(line)
            say(line, event)

        return heard

    with ExitStack() as stack:
        if status is not None:
            _open_page(status, account, stack, say)
        if observers is not None and served_keys is not None:
            _open_to_observers(observers, served_keys, account, stack, report("server"))
        run = new_folder(parent, experiment) if folder is None else folder
        if superlink is None:
            private_folder(run)  # weights, and numbers of nodes by which others could address them
        run.mkdir(parents=True, exist_ok=True)
        log.tell(run=run.resolve().name)
        inner = run / "flower"
        try:
            link, sightings = stack.enter_context(SuperLink(inner, keys, superlink)), None
            if superlink is None:
                for line in link.register():  # before nodes come, who would be taken for second ones
                    report("node")(line)
                gate = Gate(place, link.address, keys, report("gate"), link.trust, largest, mutual=mutual_tls)
                sightings = stack.enter_context(gate).sightings
            app = write_app(inner / "app", experiment, run, largest, allow_versions=allow_versions)
            account.begin(start := _start(experiment, run), sightings)
            if superlink is None:
                say(f"open at {address}; nodes join by: {_invitation(address, keys)}")
            _follow(run_app(link, app, run, report("run"), report("node")), start, account, log)
        except KeyboardInterrupt:
            say(f"potluck: interrupted; resume with: potluck serve --folder {run}", "ended")
            raise typer.Exit(128 + signal.SIGINT) from None
    _print_stored(run, experiment, log)


def _open_page(status: str, account: "Account", stack: ExitStack, say: Callable[[str], None]) -> None:
    """Open the operator's page until the stack is closed.

    Raises:
        ConfigError: its address cannot be had.
    """
    from potluck.cli.status.serving import StatusPage, is_loopback

    stack.enter_context(StatusPage(place := _address(status), account))
    say(f"how the run stands: http://{status}/")
    if not is_loopback(place[0]):
        say(f"warning: whoever reaches {status} can read how the run and its nodes stand; nothing there is encrypted")


def _open_to_observers(
    address: str, keys: Path, account: "Account", stack: ExitStack, say: Callable[[str], None]
) -> None:
    """Open what of the page is for observers until the stack is closed.

    Raises:
        ConfigError: its address cannot be had.
    """
    from potluck.cli.status.observers import Observers
    from potluck.cli.status.serving import StatusPage

    stack.enter_context(StatusPage(_address(address), account, Observers(keys, say)))
    say(f"how the run stands, for observers: https://{address}/")


def _keys_served(keys: Path | None, observers: str | None, *, mutual_tls: bool) -> Path | None:
    """The keys of a server with a gate of its own; None if it has no keys or no gate.

    Raises:
        ConfigError: it has not, and something wants them.
    """
    if keys is None:
        for option, given in (("--observers", observers), ("--mutual-tls", mutual_tls)):
            if given:
                raise ConfigError(
                    f"{option}: callers are known by certificates of `potluck keys`; give --keys FOLDER, and neither"
                    " --insecure nor --superlink"
                )
    return keys


def _follow(
    news: Iterable["RoundRecord | Progress | NodeRefused"], start: RunStart, account: "Account", log: JsonLog
) -> None:
    """Show a run on the terminal until it ends, and keep account of it."""
    with Display(note=log.note) as display:
        display.on_run_start(start)
        for one in news:
            account.take(one)
            if isinstance(one, RoundRecord | Progress):
                log.tell(round=one.round)
            if isinstance(one, RoundRecord):
                display.on_round_end(one)
            elif isinstance(one, Progress):
                display.show(one)


def take_part(
    address: str,
    *,
    keys: Path | None,
    state: Path,
    data: Path | None,
    model: str | None,
    capacity: float | None,
    device: str,
    code: Sequence[Path],
    policy: Path | None,
    audit: Path | None,
    weights: Path | None,
    train_only: Sequence[str],
    most_disk_gib: float | None,
    most_memory_gib: float | None,
    peers: Path | None,
    log: JsonLog,
) -> None:
    """Run a node until interrupted; the log has a line for each that is said.

    Limits of disk and memory are by default what the machine can spare.

    Raises:
        ConfigError: there is no such device, the data cannot be read, the model cannot be built, keys are missing.
        Refused: the server refuses this node.
    """
    from potluck.flower.node.audit import last_digest
    from potluck.flower.node.config import NodeConfig
    from potluck.flower.node.join import Credentials, NodeLine, run_node
    from potluck.flower.node.room import default_disk_gib, default_memory_gib

    _address(address)
    credentials = Credentials(address, keys)
    disk = default_disk_gib(state) if most_disk_gib is None else most_disk_gib
    memory = default_memory_gib(device) if most_memory_gib is None else most_memory_gib
    named = (state, data, model, capacity, device, tuple(code), policy, audit, weights, tuple(train_only))
    home = NodeConfig(*named, most_disk_gib=disk, most_memory_gib=memory, peers=peers)
    home.check()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that Flower's program ends too

    def say(line: NodeLine) -> None:
        typer.echo(line, err=True)
        log.note(line, line.event, round=line.round, run=line.run)

    try:
        run_node(credentials, home, say)
    finally:
        signal.signal(signal.SIGTERM, before)
        say(NodeLine(f"audit log: {home.audit_log} ends in {last_digest(home.audit_log)}", "ended"))


def _experiment(target: str | None, assignments: Sequence[str], folder: Path | None) -> Experiment:
    """The experiment of a new run, or the one that the run in the folder was started with."""
    config = folder / CONFIG if folder else None
    started = resolve(read_toml(config), str(config)) if config and config.is_file() else None
    if started is not None and target is None:
        check_free(f"--folder {folder}", assignments, "a new folder holds a run with another")
        return resolve(override(started.tree(), assignments), str(config))
    asked = experiment_for(target, [*assignments, *_unsaid(target, assignments, _SERVED)])
    if asked.run.rounds_close.asynchronous is None and asked.run.secure_sums is None:
        served = {**_SERVED, **_COMPARED}
        asked = experiment_for(target, [*assignments, *_unsaid(target, assignments, served)])
    if started is not None and differences(what_matters(started.settings()), what_matters(asked.settings())):
        raise ConfigError(
            f"{folder} was started with another configuration; resume it with: potluck serve --folder {folder}"
        )
    return asked


def _unsaid(target: str | None, assignments: Sequence[str], served: Mapping[str, str]) -> list[str]:
    """Assignments of what holds of `run` and is not said."""
    return [f"run.{key}={value}" for key, value in served.items() if not _says(target, assignments, key)]


def _says(target: str | None, assignments: Sequence[str], key: str) -> bool:
    """Whether a key of `run` was set, in the file or as an argument."""
    table = read_toml(Path(target)).get("run", {}) if target and target.endswith(".toml") else {}
    return key in table or any(assignment.startswith(f"run.{key}=") for assignment in assignments)


def _start(experiment: Experiment, run: Path) -> RunStart:
    """The start of a run that another process executes."""
    checkpoint, clients = Checkpoint.read(run / CHECKPOINT / LAST), experiment.federation.clients
    return RunStart(
        method=experiment.method_name,
        rounds=experiment.run.rounds,
        rounds_done=checkpoint.round if checkpoint else 0,
        clients=clients,
        cohort_size=experiment.run.cohort_size(clients),
        metric=task_of(experiment).primary,
        folder=run,
    )


def _print_stored(run: Path, experiment: Experiment, log: JsonLog) -> None:
    """Print the closing table, from the records that the server app wrote; the log has the end of it on a line."""
    stored = read_run(run)
    last = stored.rounds[-1]
    scores = [score for score in stored.clients if score.round == last.round]
    metrics = last.metrics or {}
    evaluation = Evaluation(scores, metrics.get("global"), task=task_of(experiment), pooled=metrics.get("pooled"))
    result = Result(list(stored.rounds), evaluation, Checkpoint.read(run / CHECKPOINT / LAST))
    print_result(run, experiment, result, stored.manifest.get("privacy"))
    end = f"; checkpoint digest: {result.checkpoint.digest}" if result.checkpoint else ""
    log.note(f"the run has ended after round {last.round}{end}", "ended")


def _address(address: str) -> tuple[str, int]:
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"address {address!r}: expected HOST:PORT, such as fl.example.org:8443")
    return name.strip("[]"), int(port)


def _invitation(address: str, keys: Path | None) -> str:
    words = "--insecure" if keys is None else f"--keys {keys}/nodes/NAME"
    return f"potluck join {address} {words} --data ... --model ..."
