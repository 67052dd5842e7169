"""The credentials that prove who may speak: a shared token, certificates, or both.

* `Token` keeps strangers out: each side proves that it knows the secret. What is said afterwards is neither encrypted
  nor protected from somebody who controls the network in between.
* `Certificates` are mutual TLS: each side shows a certificate of the same authority, and everything is encrypted.

This room reads no environment and no command line; those who start it do.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from pathlib import Path

_LEAST_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Token:
    """A secret that all processes of a run share; at least 16 bytes.

    Raises:
        NetworkError: if it is shorter.

    >>> Token(b"0123456789abcdef")
    Token()
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < _LEAST_TOKEN_BYTES:
            raise NetworkError(
                f"Cannot use a token of {len(self.secret)} bytes: it could be guessed. "
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
