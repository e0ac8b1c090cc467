"""With which software a side of a run computes: Potluck's version, and the digest of its copy of the run's method.

The server says so with every message. A node says so when it introduces itself, if it is asked, and compares the two
before each job: it may have been exchanged since it introduced itself, and so may the server. Neither is a proof, since
each says what it likes: this is for mistakes.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from potluck._version import __version__
from potluck.core.ground.digest import digest
from potluck.core.ground.text import one_line
from potluck.flower.wire.schemas import Digest, Header

LONGEST_VERSION = 64
"""The most characters of a version."""


class SoftwareEntries(Header):
    """The software, as it is sent.

    Attributes:
        version: Potluck's.
        method: digest of the file of the run's method; None if there is no such file.
    """

    version: Annotated[str, Field(min_length=1, max_length=LONGEST_VERSION)]
    method: Digest | None

    def read(self) -> "Software":
        """What they say."""
        return Software(one_line(self.version), self.method)


class ServerSoftwareEntries(SoftwareEntries):
    """The server's software, as it is sent.

    Attributes:
        others: whether nodes with other software may take part.
    """

    model_config = ConfigDict(extra="ignore", strict=True)  # servers may say more by and by
    others: bool


@dataclass(frozen=True)
class Software:
    """The software of one side.

    Attributes:
        version: Potluck's.
        method: digest of the file of the run's method; None if there is no such file.
    """

    version: str
    method: str | None

    @classmethod
    def with_method(cls, method: object) -> "Software":
        """This side's, with the method that it has loaded."""
        return cls(__version__, _digest_of(type(method)))

    def entries(self) -> dict[str, str | None]:
        """The entries by which the other side is told."""
        return {"version": self.version, "method": self.method}

    def difference(self, server: "Software") -> str | None:
        """How a node with this software differs from its server, and what to do; None if it does not."""
        if self.version != server.version:
            return f"the node has Potluck {self.version}, and the server {server.version}; {_remedy(server.version)}"
        if self.method != server.method:
            mine, theirs = (side.method or "none" for side in (self, server))
            return (
                f"the node's copy of the run's method is another than the server's (digest {mine}, there {theirs});"
                f" {_remedy(server.version)}"
            )
        return None


def unknown_software(server: Software) -> str:
    """What is wrong with a node that does not say which software it has."""
    had = "the node does not say which version of Potluck it has, and the server has"
    return f"{had} {server.version}; {_remedy(server.version)}"


def _remedy(version: str) -> str:
    return f"install {version} at the node, or let others take part: potluck serve --allow-versions"


def _digest_of(method: type) -> str | None:
    try:
        return digest(Path(inspect.getfile(method)).read_bytes())
    except (TypeError, OSError):  # it was not made of a file
        return None
