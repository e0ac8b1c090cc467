"""`potluck keys`: makes keys and certificates, renews them, and lists what there is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from potluck.core.ground.errors import ConfigError


@dataclass(frozen=True)
class KeyChanges:
    """What is to be done to a folder of keys, in the order in which it is done; nothing, and it is listed.

    Attributes:
        addresses: host names and IP addresses of a new certificate of the server's.
        nodes: names of nodes that get their first key.
        revoked: names of nodes that may take part no more.
        renewed: names of nodes that get another key.
        server: whether the server gets another certificate for the same addresses.
        authority: whether the authority's certificate gets a later end.
        another_authority: whether another authority takes its place.
    """

    addresses: Sequence[str]
    nodes: Sequence[str]
    revoked: Sequence[str]
    renewed: Sequence[str]
    server: bool
    authority: bool
    another_authority: bool

    @property
    def are_none(self) -> bool:
        """Whether there is nothing to do."""
        of_nodes = (self.nodes, self.revoked, self.renewed)
        return not (self.addresses or any(of_nodes) or self.server or self.authority or self.another_authority)


def change_keys(folder: Path, changes: KeyChanges, days: int, overlap: int) -> None:
    """Change the keys in a folder, in which certificates are made if there are none, and print what to do next.

    Args:
        folder: the folder of the keys.
        changes: what is to be done.
        days: days for which a new certificate of the server's is valid.
        overlap: days for which a former key or authority counts beside its successor.

    Raises:
        ConfigError: an address, a name or a number is none; a node is not there, or is there already; files are
            missing, or hold something else.
    """
    from potluck.flower.deploy.checks import listing
    from potluck.flower.deploy.keys import SERVER, certify

    if changes.authority and changes.another_authority:
        raise ConfigError("--renew-authority and --change-authority: give one; the same authority, or another one")
    is_new = not (folder / SERVER).is_file()
    if changes.are_none and not is_new:
        for line in listing(folder):
            typer.echo(line)
        return
    if changes.addresses or is_new:
        certify(folder, changes.addresses, days)
        typer.echo(
            f"{folder}: for the server, reachable as {', '.join([*changes.addresses, 'localhost'])}; keep it there"
        )
    _change_certificates(folder, changes, days, overlap)
    _change_nodes(folder, changes, overlap)


def _change_certificates(folder: Path, changes: KeyChanges, days: int, overlap: int) -> None:
    from potluck.flower.deploy.keys import CA, SERVER, change_authority, renew_authority, renew_server

    if changes.authority:
        end = renew_authority(folder)
        typer.echo(f"{folder / CA} ends on {end:%Y-%m-%d}: copy it to each node before its own one ends")
    if changes.another_authority:
        end = change_authority(folder, days, overlap)
        typer.echo(f"{folder / CA} is another authority's: copy it to each node before {end:%Y-%m-%d}")
    if changes.server:
        end = renew_server(folder, days)
        typer.echo(f"{folder / SERVER} ends on {end:%Y-%m-%d}; a running server takes it up by itself")


def _change_nodes(folder: Path, changes: KeyChanges, overlap: int) -> None:
    from potluck.flower.deploy.keys import add_node, renew_node, revoke_node

    for name in changes.revoked:
        revoke_node(folder, name)
        typer.echo(f"{name} is revoked")
    for name in changes.renewed:
        place, end = renew_node(folder, name, overlap)
        typer.echo(f"{place}: copy it to {name} before {end:%Y-%m-%d}, when its former key ends, then delete it here")
    for name in changes.nodes:
        typer.echo(f"{add_node(folder, name)}: copy it to {name}, then delete it here")
