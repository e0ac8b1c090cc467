"""The server's side of TLS: a certificate that is renewed while the gate is open is shown from then on."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

from potluck.flower.deploy.certificates import end_of
from potluck.flower.deploy.keys import SERVER, SERVER_KEY
from potluck.flower.deploy.registry import stamps


class Security:
    """TLS with the certificate in a folder of `potluck keys`.

    Args:
        keys: the folder.

    Attributes:
        context: for connections that are accepted, of which each shows the certificate of its time.
    """

    def __init__(self, keys: Path) -> None:
        self._files = (keys / SERVER, keys / SERVER_KEY)
        self._seen = self._shown = stamps(*self._files)
        self.context = _loaded(*self._files)
        self._ends = end_of(self._files[0])

    def look(self) -> str | None:
        """Take up a new certificate; return what an operator should know of it, None if there is no new one.

        Key and certificate are two files, which are exchanged one after the other, so that new ones are taken up when
        they are found for the second time.
        """
        before, self._seen = self._seen, stamps(*self._files)
        if self._seen == self._shown or self._seen != before:
            return None
        self._shown = self._seen
        certificate, key = self._files
        try:
            _loaded(certificate, key)  # what cannot be used must not replace what can
            self.context.load_cert_chain(certificate, key)
            self._ends = end_of(certificate)
        except OSError as error:  # as errors of TLS are
            return f"the new {certificate} cannot be used, and nodes are shown the one before: {error}"
        return f"nodes are shown the new {certificate}, which expires on {self._ends:%Y-%m-%d}"

    def fault(self, error: ssl.SSLError) -> str:
        """Why a handshake failed, on one line."""
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if reason in ("http request", "wrong version number"):
            return "it does not encrypt (no TLS)"
        if "certificate expired" in reason:
            if datetime.now(UTC) < self._ends:
                return "to it our certificate has expired; has it the ca.crt of a former authority, or a wrong clock?"
            return "our certificate has expired; make a new one: potluck keys KEYS --renew-server"
        if "unknown ca" in reason or "certificate unknown" in reason:
            return "it does not trust our certificate; has it the ca.crt of these keys?"
        return f"TLS failed ({reason})"


def _loaded(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context
