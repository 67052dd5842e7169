"""`offbeat certs`: what it makes works for mutual TLS, is for its owner's eyes, and is never overwritten."""

from __future__ import annotations

import builtins
import ssl
import stat
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.cli.certs import make
from offbeat.errors import NetworkError
from offbeat.wire.credentials import Certificates
from tests.cli.commands import offbeat

if TYPE_CHECKING:
    from pathlib import Path

FILES = {f"{name}.{kind}" for name in ("authority", "server", "worker") for kind in ("pem", "key")}


def test_it_makes_an_authority_a_server_and_a_worker(tmp_path: Path) -> None:
    code, output = offbeat("certs", "made", "--host", "node1.example", "--host", "10.1.2.3", folder=tmp_path)
    assert code == 0, output
    assert set(output.split()) == {f"made/{name}" for name in FILES}
    folder = tmp_path / "made"
    assert {path.name for path in folder.iterdir()} == FILES
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in FILES:
        assert stat.S_IMODE((folder / name).stat().st_mode) == (0o600 if name.endswith(".key") else 0o644)
    names = ssl._ssl._test_decode_cert(str(folder / "server.pem"))["subjectAltName"]  # type: ignore[attr-defined]
    assert {value for _, value in names} == {
        "localhost",
        "127.0.0.1",
        "0:0:0:0:0:0:0:1",
        "node1.example",
        "10.1.2.3",
    }
    named = ssl._ssl._test_decode_cert(str(folder / "worker.pem"))["subjectAltName"]  # type: ignore[attr-defined]
    assert named == (("URI", "offbeat:worker"),), "nobody passes for a server or a validator with it"


def test_each_call_is_another_authority(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(tmp_path / name)
    assert (tmp_path / "a/authority.pem").read_bytes() != (tmp_path / "b/authority.pem").read_bytes()


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(NetworkError, match="Choose another folder"):
        make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name], "nor is half of it written"
    assert (tmp_path / name).read_text() == "precious"


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output = offbeat("certs", "file/folder", folder=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1), output
    assert "Cannot write certificates to file/folder" in output


def test_a_host_that_is_no_name(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="neither an address nor a name"):
        make(tmp_path, ["münchen.example"])
    assert list(tmp_path.iterdir()) == []


def test_without_cryptography(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_import = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return true_import(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NetworkError, match=r"pip install 'offbeat\[certs\]'"):
        make(tmp_path)


def test_those_of_a_validator_and_of_single_workers_are_added(tmp_path: Path) -> None:
    make(tmp_path)
    code, output = offbeat("certs", ".", "--validator", "--worker", 3, "--worker", 4, folder=tmp_path)
    assert code == 0, output
    names = [f"{name}.{kind}" for name in ("validator", "worker-3", "worker-4") for kind in ("pem", "key")]
    assert sorted(output.split()) == sorted(names)
    authority = ssl.create_default_context(cafile=tmp_path / "authority.pem")
    for name, entry in (("validator", "offbeat:validator"), ("worker-4", "offbeat:worker:4")):
        shown = ssl._ssl._test_decode_cert(str(tmp_path / f"{name}.pem"))  # type: ignore[attr-defined]
        assert shown["subjectAltName"] == (("URI", entry),)
        assert shown["issuer"] == authority.get_ca_certs()[0]["subject"]
    code, output = offbeat("certs", ".", "--validator", folder=tmp_path)
    assert code == 2
    assert "it is there, and workers may rely on it" in output


def test_peers_have_certificates_for_their_addresses_that_others_can_dial(tmp_path: Path) -> None:
    code, output = offbeat("certs", "made", "--peer", "10.1.2.3", folder=tmp_path)
    assert code == 0, output
    code, output = offbeat("certs", "made", "--peer", "127.0.0.1", folder=tmp_path)
    assert code == 0, output
    assert output.split() == ["made/peer-127.0.0.1.pem", "made/peer-127.0.0.1.key"]
    made = tmp_path / "made"

    def certificates(name: str) -> Certificates:
        return Certificates(made / f"{name}.pem", made / f"{name}.key", made / "authority.pem")

    certificates("peer-10.1.2.3").check_serves("10.1.2.3")
    certificates("peer-127.0.0.1").check_serves("127.0.0.1")
    with pytest.raises(NetworkError, match=r"127\.0\.0\.1 with .*peer-10.*offbeat certs FOLDER --peer 127\.0\.0\.1"):
        certificates("peer-10.1.2.3").check_serves("127.0.0.1")
    with pytest.raises(NetworkError, match="unsuitable certificate purpose"):
        certificates("worker").check_serves("127.0.0.1")


def test_a_peer_whose_address_nobody_knows(tmp_path: Path) -> None:
    code, output = offbeat("certs", "made", "--peer", "nowhere.invalid", folder=tmp_path)
    assert code != 0
    assert "Cannot make a certificate for 'nowhere.invalid': its address is not known here" in " ".join(output.split())
