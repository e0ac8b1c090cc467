"""What a key is for: nodes take part with theirs, and observers read with theirs how a run stands.

An operator is whoever has the folder of the keys, and has no other key.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Role:
    """What somebody may do who has a key.

    Attributes:
        word: the role in a word.
        below: the folder below that of the keys with the public keys of those who have it.
    """

    word: str
    below: str

    @property
    def carried(self) -> str:
        """The folder below that of the keys with a folder for each, until that is copied."""
        return f"{self.word}s"

    @property
    def secret(self) -> str:
        """The file with the secret key, in the folder of each."""
        return f"{self.word}.key"

    @property
    def certificate(self) -> str:
        """The file with the key's certificate, there likewise."""
        return f"{self.word}.crt"

    def registry_in(self, keys: Path) -> Path:
        """The folder with the public keys of those who have this role, see `potluck.flower.deploy.registry`."""
        return keys / self.below


NODE, OBSERVER = Role("node", "."), Role("observer", "observing")
ROLES = (NODE, OBSERVER)
