"""`offbeat certs`: an authority for development, and certificates of it for mutual TLS."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.errors import NetworkError
from offbeat.wire.credentials import CertifiedRole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

LOCAL = ("localhost", "127.0.0.1", "::1")
_VALID = datetime.timedelta(days=365)
# A machine whose clock is a little behind shall accept them at once.
_BEFORE = datetime.timedelta(hours=1)


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for them; made if it is not there.", show_default=False)],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address of a server; several times for several.")
    ] = None,
    validator: Annotated[
        bool, typer.Option("--validator", help="One of a validator, too, which no worker can pass for.")
    ] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="One of workers on the machine of this name or address, too, whom other workers can dial."),
    ] = None,
    worker: Annotated[
        list[int] | None,
        typer.Option(help="One of the worker of this rank, too, and of no other; several times for several.", min=0),
    ] = None,
) -> None:
    """Make a development authority, and certificates of servers and of workers.

    Servers can be reached as localhost, and as each HOST. Whoever has authority.key can admit anybody. Where FOLDER has
    an authority, --validator, --peer and --worker add certificates of it.
    """
    roles = [*([CertifiedRole("validator")] if validator else []), *(CertifiedRole("worker", r) for r in worker or ())]
    for name in make(folder, (*LOCAL, *(host or ())), roles, peer or ()):
        typer.echo(str(folder / name))


def make(
    folder: Path, hosts: Sequence[str] = LOCAL, roles: Sequence[CertifiedRole] = (), peers: Sequence[str] = ()
) -> list[str]:
    """Write authority, server and worker, each a certificate (.pem) and a key (.key, for its owner's eyes only).

    Args:
        hosts: names and addresses under which the servers are dialled.
        roles: of further certificates; where there is an authority, only these and those of peers are written.
        peers: names and addresses of machines whose workers others dial; of a name, all addresses that it has now.

    Returns:
        The names of the files.

    Raises:
        NetworkError: if one of the files is there, the folder cannot be written, or cryptography is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError as error:
        raise NetworkError(
            "Cannot make certificates: cryptography is not installed. pip install 'offbeat[certs]'"
        ) from error
    leaf = x509.BasicConstraints(ca=False, path_length=None)
    client = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])

    def issue(role: CertifiedRole, by: _Pair) -> _Pair:
        named = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(role))])
        return _issue(f"offbeat {_file_of(role)}", by, [leaf, client, named])

    # A server may dial other servers, too; with a worker's certificate nobody can pass for a server.
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])

    def further(by: _Pair) -> dict[str, _Pair]:
        is_peer = x509.UniformResourceIdentifier(str(CertifiedRole("peer")))
        found = {_file_of(role): issue(role, by) for role in roles}
        for peer in peers:
            named = x509.SubjectAlternativeName([is_peer, *(_name(address) for address in _addresses(peer))])
            found[f"peer-{peer}"] = _issue(f"offbeat peer {peer}", by, [leaf, both, named])
        return found

    if (roles or peers) and (folder / "authority.key").exists():
        return _write_pairs(folder, further(_read_authority(folder)))
    authority = _issue("offbeat development authority", None, [x509.BasicConstraints(ca=True, path_length=0)])
    names = x509.SubjectAlternativeName([_name(host) for host in dict.fromkeys(hosts)])
    files = {
        "authority": authority,
        "server": _issue("offbeat server", authority, [leaf, both, names]),
        "worker": issue(CertifiedRole("worker"), authority),
        **further(authority),
    }
    return _write_pairs(folder, files)


def _file_of(role: CertifiedRole) -> str:
    return role.role if role.rank is None else f"{role.role}-{role.rank}"


def _read_authority(folder: Path) -> _Pair:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificate((folder / "authority.pem").read_bytes())
        key = load_pem_private_key((folder / "authority.key").read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise NetworkError(f"Cannot use the authority in {folder}: {error}. Choose another folder.") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise NetworkError(f"Cannot use the authority in {folder}: it is none of offbeat's. Choose another folder.")
    return _Pair(certificate, key)


def _write_pairs(folder: Path, files: Mapping[str, _Pair]) -> list[str]:
    """Write certificate and key of each; the names of the files."""
    contents = {f"{name}.pem": pair.certificate_pem for name, pair in files.items()}
    contents |= {f"{name}.key": pair.key_pem for name, pair in files.items()}
    _write(folder, contents)
    return list(contents)


@dataclass(frozen=True)
class _Pair:
    certificate: x509.Certificate
    key: EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        from cryptography.hazmat.primitives.serialization import Encoding

        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _issue(name: str, by: _Pair | None, extensions: Sequence[x509.ExtensionType]) -> _Pair:
    """A new key and its certificate, signed by `by`, or by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signer = by.key if by else key
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_key_usage(signs=by is None), critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return _Pair(builder.sign(signer, hashes.SHA256()), key)


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _addresses(host: str) -> list[str]:
    """A name or address, and all addresses of the name."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NetworkError(
            f"Cannot make a certificate for {host!r}: its address is not known here ({error.strerror}). Give the "
            "address itself."
        ) from error
    return [host, *dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found)]


def _name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise NetworkError(f"Cannot make a certificate for {host!r}: it is neither an address nor a name.") from error


def _write(folder: Path, contents: dict[str, bytes]) -> None:
    there = [name for name in contents if (folder / name).exists()]
    if there:
        raise NetworkError(
            f"Cannot write {folder / there[0]}: it is there, and workers may rely on it. Choose another folder."
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in contents.items():
            mode = 0o600 if name.endswith(".key") else 0o644
            # EXCL: nobody else may have put a file, or a link to one, there in the meantime.
            number = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(number, "wb") as file:
                file.write(data)
    except OSError as error:
        raise NetworkError(f"Cannot write certificates to {folder}: {error}. Choose another folder.") from error
