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
        observers: names of observers that get theirs.
        revoked: names of nodes and observers whose keys count no more.
        renewed: names of nodes and observers that get another key.
        server: whether the server gets another certificate for the same addresses.
        authority: whether the authority's certificate gets a later end.
        another_authority: whether another authority takes its place.
    """

    addresses: Sequence[str]
    nodes: Sequence[str]
    observers: Sequence[str]
    revoked: Sequence[str]
    renewed: Sequence[str]
    server: bool
    authority: bool
    another_authority: bool

    @property
    def are_none(self) -> bool:
        """Whether there is nothing to do."""
        of_holders = (self.nodes, self.observers, self.revoked, self.renewed)
        return not (self.addresses or any(of_holders) or self.server or self.authority or self.another_authority)


def change_keys(folder: Path, changes: KeyChanges, days: int, overlap: int) -> None:
    """Change the keys in a folder, in which certificates are made if there are none, and print what to do next.

    Args:
        folder: the folder of the keys.
        changes: what is to be done.
        days: days for which a new certificate of the server's or an observer's is valid.
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
    _change_holders(folder, changes, days, overlap)


def _change_certificates(folder: Path, changes: KeyChanges, days: int, overlap: int) -> None:
    from potluck.flower.deploy.keys import CA, SERVER, change_authority, renew_authority, renew_server

    if changes.authority:
        end = renew_authority(folder)
        typer.echo(f"{folder / CA} ends on {end:%Y-%m-%d}: copy it to each node before its own one ends")
        _tell_certificates(folder)
    if changes.another_authority:
        end = change_authority(folder, days, overlap)
        typer.echo(f"{folder / CA} is another authority's: copy it to each node before {end:%Y-%m-%d}")
        _tell_certificates(folder)
    if changes.server:
        end = renew_server(folder, days)
        typer.echo(f"{folder / SERVER} ends on {end:%Y-%m-%d}; a running server takes it up by itself")


def _tell_certificates(folder: Path) -> None:
    """Say of new certificates of nodes and observers where they belong."""
    from potluck.flower.deploy.roles import ROLES

    for role in ROLES:
        if places := sorted((folder / role.carried).glob(f"*/{role.certificate}")):
            names = ", ".join(place.parent.name for place in places)
            typer.echo(f"{folder / role.carried}/NAME/{role.certificate}: copy it likewise to {names}")


def _change_holders(folder: Path, changes: KeyChanges, days: int, overlap: int) -> None:
    from potluck.flower.deploy.keys import (
        add_node,
        add_observer,
        is_observer,
        renew_node,
        renew_observer,
        revoke_node,
        revoke_observer,
    )

    for name in changes.revoked:
        (revoke_observer if is_observer(folder, name) else revoke_node)(folder, name)
        typer.echo(f"{name} is revoked")
    for name in changes.renewed:
        if is_observer(folder, name):
            place, end = renew_observer(folder, name, overlap, days)
        else:
            place, end = renew_node(folder, name, overlap)
        typer.echo(f"{place}: copy it to {name} before {end:%Y-%m-%d}, when its former key ends, then delete it here")
    for place, name in (
        *((add_node(folder, name), name) for name in changes.nodes),
        *((add_observer(folder, name, days), name) for name in changes.observers),
    ):
        typer.echo(f"{place}: copy it to {name}, then delete it here")
