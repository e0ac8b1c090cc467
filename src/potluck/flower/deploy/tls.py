"""TLS: a server shows a certificate, also one that is renewed while it is open, and may ask callers for theirs."""

import secrets
import ssl
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile

from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from potluck.core.ground.errors import PotluckError
from potluck.flower.deploy.certificates import as_pem, certificates_in, end_of, key_in
from potluck.flower.deploy.keys import CA, FORMERS, SERVER, SERVER_KEY, formers_in, node_secret, public_key_of
from potluck.flower.deploy.registry import Stamps, stamps
from potluck.flower.deploy.roles import NODE


class Security:
    """The server's side of TLS, with the certificate in a folder of `potluck keys`.

    Args:
        keys: the folder.
        mutual: whether callers are asked for a certificate of the same authority, or of a former one that counts, and
            have no connection without. What one is worth is for others to decide: see `Desk.greet`.

    Attributes:
        context: for connections that are accepted; another one as soon as there are other files.
    """

    def __init__(self, keys: Path, *, mutual: bool = False) -> None:
        self._keys, self._mutual = keys, mutual
        self._own = (keys / SERVER, keys / SERVER_KEY)
        self._files = (*self._own, *((keys / CA, keys / FORMERS) if mutual else ()))
        self._seen = self._taken = stamps(*self._files)
        self._ends = end_of(keys / SERVER)
        self.context = self._loaded()

    def look(self) -> str | None:
        """Take up new files; return what an operator should know of them, None if there are no new ones.

        Key and certificate are two files, which are exchanged one after the other, so that new ones are taken up when
        they are found for the second time.
        """
        before, self._seen = self._seen, stamps(*self._files)
        if self._seen == self._taken or self._seen != before:
            return None
        (certificate, _), known, self._taken = self._own, self._of_server(self._taken), self._seen
        try:
            ends, self.context = end_of(certificate), self._loaded()  # what cannot be used does not replace what can
        except (PotluckError, OSError) as error:  # as errors of TLS are
            return f"the new {certificate} cannot be used, and nodes are shown the one before: {error}"
        self._ends = ends
        if self._of_server(self._seen) == known:
            return f"certificates of callers are checked by the new {self._keys / CA}"
        return f"nodes are shown the new {certificate}, which expires on {self._ends:%Y-%m-%d}"

    def fault(self, error: ssl.SSLError) -> str:
        """Why a handshake failed, on one line."""
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate is not one of these keys, or no more ({error.verify_message})"
        if "peer did not return a certificate" in reason:
            return "it shows no certificate, which is asked for here"
        if reason in ("http request", "wrong version number"):
            return "it does not encrypt (no TLS)"
        if "certificate expired" in reason:
            if datetime.now(UTC) < self._ends:
                return "to it our certificate has expired; has it the ca.crt of a former authority, or a wrong clock?"
            return "our certificate has expired; make a new one: potluck keys KEYS --renew-server"
        if "unknown ca" in reason or "certificate unknown" in reason:
            return "it does not trust our certificate; has it the ca.crt of these keys?"
        return f"TLS failed ({reason})"

    def _of_server(self, found: Stamps) -> Stamps:
        """What of it is of the server's own certificate and key."""
        own = [str(path) for path in self._own]
        return tuple(stamp for stamp in found if stamp[0] in own)

    def _loaded(self) -> ssl.SSLContext:
        """The context of the files as they are now."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._own)
        if self._mutual:
            # Before TLS 1.3 a caller's certificate, and its name in it, are open to whoever listens; and a session that
            # is taken up again would not be asked for one.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
            context.verify_mode = ssl.CERT_REQUIRED
            known = [*certificates_in(self._keys / CA), *formers_in(self._keys)]
            context.load_verify_locations(cadata=as_pem(known).decode("ascii"))
        return context


def side_of_node(place: Path) -> ssl.SSLContext:
    """A node's side of TLS, with the keys in its folder: it trusts their authority, and shows its certificate if asked.

    Raises:
        ConfigError: a file does not hold what it should.
    """
    context = ssl.create_default_context(cafile=str(place / CA))
    show_certificate(context, place)
    return context


def show_certificate(context: ssl.SSLContext, place: Path) -> None:
    """Have a node show its certificate to servers that ask for one, if its folder has one of its key.

    Raises:
        ConfigError: a file does not hold what it should.
    """
    certificate = place / NODE.certificate
    if not certificate.is_file() or key_in(certificates_in(certificate)[0]) != public_key_of(place):
        return
    # Python reads keys from files alone, and none in the format that Flower wants of node.key: the file for it is gone
    # at once, and its content is locked by a word that nobody else has.
    word = secrets.token_bytes(32).hex().encode()
    content = node_secret(place).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(word))
    with NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        context.load_cert_chain(certificate, file.name, word)
