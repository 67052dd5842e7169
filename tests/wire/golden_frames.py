"""Frames as they are on the wire, which the fuzzer begins with: `python -m tests.wire.golden_frames` writes them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from offbeat.wire.frame import Frame, Kind, encode
from offbeat.wire.messages import (
    AskRoster,
    HandshakeClaim,
    HandshakeRefused,
    Hello,
    Join,
    Message,
    ReportWords,
    Welcome,
    WorkerReport,
)

CORPUS = Path(__file__).parent.parent.parent / "fuzz" / "corpus"
_NONCE = bytes(range(32))


def _message(message: Message) -> Frame:
    return Frame(msgspec.msgpack.encode(message))


GOLDEN = {
    "empty": [Frame(b"")],
    "metadata": [Frame(b"metadata")],
    "body": [Frame(b"metadata", b"body", kind=Kind.DATA, number=1, urgent=True)],
    "long-body": [Frame(b"m" * 300, bytes(range(256)) * 100, kind=Kind.DATA, number=2**40)],
    "session": [
        Frame(b"1", b"first", kind=Kind.DATA, number=1),
        Frame(b"", kind=Kind.ACK, received=7),
        Frame(b"2", kind=Kind.DATA, number=2, received=8),
        Frame(b"", kind=Kind.END, number=3),
    ],
    "failure": [Frame(b"there are four buckets", kind=Kind.FAIL)],
    "hello": [_message(Hello(_NONCE))],
    "join": [
        _message(
            Join(HandshakeClaim(rank=3, job="mnist", session=_NONCE[:16], received=9, resumes=True), _NONCE, _NONCE)
        )
    ],
    "welcome": [_message(Welcome(_NONCE, 9)), Frame(b"1", b"first", kind=Kind.DATA, number=1)],
    "refused": [_message(HandshakeRefused(_NONCE, "its session is over"))],
    "report": [
        _message(ReportWords(WorkerReport(rank=1, host="a", phase="exchanging", step=7))),
        _message(AskRoster(1, (0, 2))),
    ],
}


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for name, frames in GOLDEN.items():
        (CORPUS / name).write_bytes(b"".join(map(encode, frames)))
