"""The credentials that prove who may speak: a shared token, certificates, or both.

* `Token` keeps strangers out: each side proves that it knows the secret. What is said afterwards is neither encrypted
  nor protected from somebody who controls the network in between.
* `Certificates` are mutual TLS: each side shows a certificate of the same authority, and everything is encrypted.

Either also says who is a validator, which workers are not to pass for: whoever knows a second token, or a certificate
in which that stands (`CertifiedRole`).

This room reads no environment and no command line; those who start it do.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from offbeat.wire.messages import HandshakeClaim, Role

_LEAST_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Token:
    """A secret that all processes of a run share; at least 16 bytes.

    Args:
        secret: that all know.
        validator: another one, that the server and the validators know, and no worker; b"" for none.

    Raises:
        NetworkError: if one is shorter.

    >>> Token(b"0123456789abcdef")
    Token()
    """

    secret: bytes = field(repr=False)
    validator: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        for secret in (self.secret, *([self.validator] if self.validator else [])):
            if len(secret) < _LEAST_TOKEN_BYTES:
                raise NetworkError(
                    f"Cannot use a token of {len(secret)} bytes: it could be guessed. "
                    f"Use at least {_LEAST_TOKEN_BYTES}, such as secrets.token_bytes(32)."
                )


@dataclass(frozen=True)
class Certificates:
    """Mutual TLS, version 1.2 or later.

    Args:
        certificate, key: of this process, PEM files.
        authority: who must have signed the other side's certificate, a PEM file.
        token: to be proved on top of it.
    """

    certificate: Path
    key: Path
    authority: Path
    token: Token | None = None

    def server_context(self) -> ssl.SSLContext:
        """The TLS context of the side that listens.

        Raises:
            NetworkError: if a file cannot be used.
        """
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def client_context(self) -> ssl.SSLContext:
        """The TLS context of the side that dials; the dialled name or address must stand in the other's certificate.

        Raises:
            NetworkError: if a file cannot be used.
        """
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def check_serves(self, host: str) -> None:
        """See that others who dial this address would take this certificate for it, and this process theirs.

        Raises:
            NetworkError: if not; a worker's, which is good for dialling a server, is not.
        """
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = [
            self.client_context().wrap_bio(incoming, outgoing, server_hostname=host),
            self.server_context().wrap_bio(outgoing, incoming, server_side=True),
        ]
        try:
            while sides:
                side = sides.pop(0)
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    sides.append(side)
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise NetworkError(
                f"Cannot have other workers dial {host} with {self.certificate}: {reason}. Make a certificate for that "
                f"with `offbeat certs FOLDER --peer {host}`."
            ) from error

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
            context.load_verify_locations(self.authority)
        except (OSError, ValueError) as error:
            files = f"{self.certificate}, {self.key} and {self.authority}"
            raise NetworkError(
                f"Cannot use the certificates in {files}: {error}. Make new ones with `offbeat certs FOLDER`."
            ) from error
        return context


Credentials = Token | Certificates


def token_of(credentials: Credentials | None) -> bytes:
    """The secret that is proved when a connection is opened; b"" if there is none."""
    token = credentials.token if isinstance(credentials, Certificates) else credentials
    return token.secret if token else b""


def validator_token_of(credentials: Credentials | None) -> bytes:
    """The secret that validators prove in addition; b"" if there is none, as where certificates say who is one."""
    return credentials.validator if isinstance(credentials, Token) else b""


@dataclass(frozen=True)
class CertifiedRole:
    """The role that a certificate is for, as an entry (URI) of its subject alternative name has it.

    Args:
        role: "validator", "worker", or "peer", which other workers dial; "" if it names none.
        rank: of the worker; None for any.

    >>> str(CertifiedRole("worker", 3)), CertifiedRole.named_in([("URI", "offbeat:validator")]).role
    ('offbeat:worker:3', 'validator')
    """

    role: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        return f"offbeat:{self.role}" + ("" if self.rank is None else f":{self.rank}")

    @classmethod
    def named_in(cls, names: Iterable[tuple[str, str]]) -> CertifiedRole:
        """Read the entry from the alternative names of a certificate, as `ssl` gives them."""
        for kind, name in names:
            scheme, _, rest = name.partition(":")
            role, _, rank = rest.partition(":")
            if kind == "URI" and scheme == "offbeat" and role in _MAY_CLAIM:
                return cls(role, int(rank) if rank.isdecimal() else None)
        return cls()

    def refusal(self, claim: HandshakeClaim) -> str:
        """The reason why who shows the certificate may not claim this; "" if it may."""
        if self.role and claim.role not in _MAY_CLAIM[self.role]:
            return f"its certificate is that of a {self.role}, and it comes as a {claim.role}"
        if self.role == claim.role and self.role in ("worker", "peer") and self.rank not in (None, claim.rank):
            return f"its certificate is that of rank {self.rank}, and it comes as rank {claim.rank}"
        return ""


# By what stands in a certificate. Whom nothing is said of may be anything but a validator.
_MAY_CLAIM: dict[str, tuple[Role, ...]] = {
    "worker": ("worker", "onlooker", "operator"),
    "validator": ("validator", "onlooker", "operator"),
    "peer": ("peer", "worker", "onlooker", "operator"),
}


def require_credentials(what: str, bind: str, credentials: Credentials | None) -> None:
    """See that a server that others than this machine can reach lets nobody in unasked.

    Args:
        what: is to be opened, for the message.
        bind: the IP address it is to listen on.

    Raises:
        NetworkError: if it may not.
    """
    try:
        loopback = ipaddress.ip_address(bind.partition("%")[0]).is_loopback
    except ValueError as error:
        raise NetworkError(f"Cannot open {what} on {bind!r}: it is no IP address, such as 127.0.0.1 or ::1.") from error
    if credentials is None and not loopback:
        raise NetworkError(
            f"Cannot open {what} on {bind} without a token or certificates: anybody could join. "
            "Give every worker the same secret, or use a loopback address."
        )


def _no_password() -> str:
    # Left out, OpenSSL would ask for it on the terminal.
    raise ValueError("the key is locked with a password")
