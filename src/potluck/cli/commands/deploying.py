"""Commands that take models and federations to other machines, or make what all of them have in common."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.commands.shared import OverridesArgument, ParentOption, TargetArgument, told_apart

if TYPE_CHECKING:
    from potluck.cli.jsonlog import JsonLog

LogJsonOption = Annotated[
    Path | None, typer.Option(help="File to which each line that is said is added as a JSON object, for collectors.")
]


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    to: Annotated[Path, typer.Option(help="File: .pt, .safetensors (weights), .pt2, .ts or .onnx (a program).")],
    client: Annotated[int | None, typer.Option(help="Number of the client whose model it is.")] = None,
    server: Annotated[bool, typer.Option("--global", help="The global model instead.")] = False,
    format: Annotated[
        str | None, typer.Option(help="state-dict, exported, torchscript or onnx. Default: by the file's ending.")
    ] = None,
    chosen: Annotated[bool, typer.Option("--chosen", help="Of the round that is best on validation parts.")] = False,
) -> None:
    """Write the model that a client predicts with to a file that works without the run."""
    from potluck.cli.export import write_network

    write_network(run, to, client=client, server=server, format=format, chosen=chosen)


def keys(
    folder: Annotated[Path, typer.Argument(help="Folder of the keys; existing ones are kept.")] = Path("keys"),
    address: Annotated[
        list[str] | None, typer.Option(help="Host name or IP address under which nodes reach the server.")
    ] = None,
    node: Annotated[list[str] | None, typer.Option(help="Name of a node that gets a key.")] = None,
    observer: Annotated[
        list[str] | None, typer.Option(help="Name of an observer, who may read how runs stand, that gets a key.")
    ] = None,
    revoke: Annotated[list[str] | None, typer.Option(help="Name of a node or an observer to revoke.")] = None,
    renew: Annotated[
        list[str] | None, typer.Option(help="Name of a node or an observer that gets another key.")
    ] = None,
    renew_server: Annotated[
        bool, typer.Option("--renew-server", help="Another certificate of the server's, for the same addresses.")
    ] = False,
    renew_authority: Annotated[
        bool,
        typer.Option("--renew-authority", help="The same authority with a later end; copy its ca.crt to nodes."),
    ] = False,
    change_authority: Annotated[
        bool, typer.Option("--change-authority", help="Another authority; copy its ca.crt to nodes.")
    ] = False,
    days: Annotated[
        int, typer.Option(help="Days for which a certificate of the server or an observer is valid.")
    ] = 365,
    overlap: Annotated[
        int, typer.Option(help="Days for which a former key or authority counts beside its successor.")
    ] = 30,
) -> None:
    """Make keys and certificates for a federation across machines, renew them, or list them and their ends."""
    from potluck.cli.flower import require_flower
    from potluck.cli.keys import KeyChanges, change_keys

    require_flower()
    changes = KeyChanges(
        addresses=address or [],
        nodes=node or [],
        observers=observer or [],
        revoked=revoke or [],
        renewed=renew or [],
        server=renew_server,
        authority=renew_authority,
        another_authority=change_authority,
    )
    change_keys(folder, changes, days, overlap)


def public(
    to: Annotated[Path, typer.Option(help="The .npz file to write.")],
    target: TargetArgument = None,
    overrides: OverridesArgument = None,
) -> None:
    """Write a federation's public examples and common test set, prepared, for nodes without PyTorch."""
    from potluck.cli.public import write_public

    target, assignments = told_apart(target, overrides)
    write_public(target, assignments, to)


def tokenizer(
    table: Annotated[
        str, typer.Argument(help="Texts that may be known: a .csv or .parquet file, a folder, or FILE.py:FUNCTION.")
    ],
    text: Annotated[list[str], typer.Option(help="Column of texts; several are joined, each in a line.")],
    size: Annotated[
        int, typer.Option(help="The most tokens, of which 256 are bytes and one is for padding.", min=258)
    ] = 2000,
    to: Annotated[Path, typer.Option(help="The file to write.")] = Path("tokenizer.json"),
) -> None:
    """Make a tokenizer for `federation.columns.tokenizer`, of frequent words and parts of words of a table's texts."""
    from potluck.cli.tokenizer import write_tokenizer

    write_tokenizer(table, text, size, to)


def serve(
    target: TargetArgument = None,
    overrides: OverridesArgument = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen at for nodes.")] = "0.0.0.0:8443",
    keys: Annotated[Path | None, typer.Option(help="Folder made by `potluck keys`.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No encryption; anybody may be a node.")] = False,
    to: ParentOption = Path("runs"),
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the run, which is resumed if it was started before.")
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(help="HOST:PORT of your own SuperLink. Default: start one behind a gate.")
    ] = None,
    largest_reply: Annotated[
        float, typer.Option(min=0.0, max=16.0, help="The most GiB of one reply of a node; a larger one is refused.")
    ] = 4.0,
    status: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a page with how the run and its nodes stand, such as 127.0.0.1:8600."),
    ] = None,
    observers: Annotated[
        str | None, typer.Option(help="HOST:PORT of what of that page is for observers, over TLS, by their keys.")
    ] = None,
    mutual_tls: Annotated[
        bool,
        typer.Option("--mutual-tls", help="Nothing is read of a caller that shows no certificate of a node's."),
    ] = False,
    allow_versions: Annotated[
        bool,
        typer.Option("--allow-versions", help="Nodes with another version of Potluck or of the method may take part."),
    ] = False,
    log_json: LogJsonOption = None,
) -> None:
    """Run a federation whose clients are nodes on other machines."""
    from potluck.cli.flower import host, require_flower
    from potluck.cli.jsonlog import JsonLog

    require_flower()
    target, assignments = told_apart(target, overrides)
    trusted = _trusted(keys, insecure)
    with JsonLog(log_json, "server", trusted) as log:
        if insecure:
            _tell_insecure(log)
        host(
            target,
            assignments,
            parent=to,
            folder=folder,
            address=listen,
            keys=trusted,
            superlink=superlink,
            largest_reply=largest_reply,
            status=status,
            observers=observers,
            mutual_tls=mutual_tls,
            allow_versions=allow_versions,
            log=log,
        )


def join(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the server.")],
    keys: Annotated[Path | None, typer.Option(help="This node's folder, made by `potluck keys`.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without encryption and without a key.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Own data: an .npz file or a folder of images. Default: a share of the server's."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Own model: of `potluck list models`, or path/to/file.py:function.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="File of initial weights, .safetensors or .pt: of the own model, or of the server's."),
    ] = None,
    train_only: Annotated[
        list[str] | None, typer.Option(help="Module of the own model that is trained, or head; all others are frozen.")
    ] = None,
    capacity: Annotated[float | None, typer.Option(help="Share of the full model that fits in this machine.")] = None,
    device: Annotated[str, typer.Option(help="Device to compute on: cpu, auto, cuda, cuda:1, mps or xpu.")] = "cpu",
    allow_code: Annotated[
        list[Path] | None,
        typer.Option(help="Own copy of a Python file that the server may name as method or model."),
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="A TOML file with what the server may ask of this node.")] = None,
    audit: Annotated[
        Path | None, typer.Option(help="File of the audit log, a line for each request. Default: in the state folder.")
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder for the node's state.")] = Path("node"),
    most_disk_gib: Annotated[
        float | None,
        typer.Option(min=0.01, help="The most GiB of that folder. Default: it leaves a quarter of what is free."),
    ] = None,
    most_memory_gib: Annotated[
        float | None,
        typer.Option(min=0.5, help="The most GiB of memory to compute with. Default: three quarters of it, on a CPU."),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="File of `potluck peer`'s lines: take part in secure sums alone, and with these nodes."),
    ] = None,
    log_json: LogJsonOption = None,
) -> None:
    """Take part in a federation as a node, until interrupted."""
    from potluck.cli.flower import require_flower, take_part
    from potluck.cli.jsonlog import JsonLog

    require_flower()
    trusted = _trusted(keys, insecure)
    with JsonLog(log_json, "node", trusted) as log:
        if insecure:
            _tell_insecure(log)
        take_part(
            address,
            keys=trusted,
            state=state,
            data=data,
            model=model,
            capacity=capacity,
            device=device,
            code=allow_code or [],
            policy=policy,
            audit=audit,
            weights=weights,
            train_only=train_only or [],
            most_disk_gib=most_disk_gib,
            most_memory_gib=most_memory_gib,
            peers=peers,
            log=log,
        )


def peer(
    name: Annotated[str, typer.Argument(help="What others call this node in their lists.")],
    state: Annotated[Path, typer.Option(help="Folder for the node's state, which holds its key.")] = Path("node"),
) -> None:
    """Print this node's line for the lists of peers with which other nodes join, see `potluck join --peers`."""
    from potluck.cli.flower import require_flower

    require_flower()
    from potluck.flower.node.peers import peer_line

    typer.echo(peer_line(name, state))


def _trusted(keys: Path | None, insecure: bool) -> Path | None:
    """The keys; None only with --insecure."""
    if (keys is None) != insecure:
        raise typer.BadParameter("give --keys FOLDER, made by `potluck keys`, or --insecure; one of them")
    return keys


def _tell_insecure(log: "JsonLog") -> None:
    line = "Warning: no encryption; anyone in this network can read the messages and take part."
    typer.echo(line, err=True)
    log.note(line, "warning", level="warning")
