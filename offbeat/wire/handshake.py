"""The handshake: two processes prove to each other that they know the run's token, without sending it.

    who dials                                who listens
      | <----------- Hello(nonce) ----------- |
      | -- Join(claim, nonce, proof) -------> |   HMAC-SHA256 with the token over "peer", both nonces and the claim
      | <----------- Welcome(proof, ...) ---- |   the same over "hub", both nonces, the claim and what else it says

Each side's nonce is fresh, so a proof is worth nothing a second time; who says it is in it, so it is worth nothing sent
back. The claim is in it, so nobody on the way can change rank, job or session. Where there is no token it is b"": the
proof then proves nothing, and certificates or loopback have to.

What workers may not do takes another token, which they do not know: who has it proves that as well, in the same way.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

import msgspec

from offbeat.errors import PeerError
from offbeat.wire.messages import HandshakeClaim, HandshakeRefused, Hello, Join, Welcome

_MAX_REASON = 500


def hello() -> Hello:
    """The first word of who listens."""
    return Hello(secrets.token_bytes(32))


def join(token: bytes, said: Hello, claim: HandshakeClaim, validator_token: bytes = b"") -> Join:
    """The answer of who dials."""
    nonce = secrets.token_bytes(32)
    role_proof = _proof(validator_token, "role", said.nonce, nonce, claim) if validator_token else b""
    return Join(claim, nonce, _proof(token, "peer", said.nonce, nonce, claim), role_proof)


def check(token: bytes, said: Hello, answer: Join) -> None:
    """See that who dials knows the token.

    Raises:
        PeerError: if it does not.
    """
    expected = _proof(token, "peer", said.nonce, answer.nonce, answer.claim)
    if not hmac.compare_digest(answer.proof, expected):
        raise PeerError("its token is wrong")


def knows_validator_token(validator_token: bytes, said: Hello, answer: Join) -> bool:
    """Whether who dials knows the token of validators; nobody does where there is none."""
    expected = _proof(validator_token, "role", said.nonce, answer.nonce, answer.claim)
    return bool(validator_token) and hmac.compare_digest(answer.role_proof, expected)


def welcome(token: bytes, said: Hello, answer: Join, received: int = 0) -> Welcome:
    """The last word of who listens."""
    return Welcome(_proof(token, "hub", said.nonce, answer.nonce, answer.claim, received), received)


def check_welcome(token: bytes, said: Hello, answer: Join, last: Welcome) -> None:
    """See that who listens knows the token.

    Raises:
        PeerError: if it does not.
    """
    expected = _proof(token, "hub", said.nonce, answer.nonce, answer.claim, last.received)
    if not hmac.compare_digest(last.proof, expected):
        raise PeerError("it does not know the token")


def refuse(token: bytes, said: Hello, answer: Join, reason: str) -> HandshakeRefused:
    """Refuse instead of welcoming: the reason for a dialler that knows the token."""
    reason = reason[:_MAX_REASON]
    return HandshakeRefused(_proof(token, "hub", said.nonce, answer.nonce, answer.claim, reason), reason)


def check_refused(token: bytes, said: Hello, answer: Join, last: HandshakeRefused) -> None:
    """See that it is not just anybody who says no.

    Raises:
        PeerError: if it is.
    """
    expected = _proof(token, "hub", said.nonce, answer.nonce, answer.claim, last.reason)
    if not hmac.compare_digest(last.proof, expected):
        raise PeerError("it does not know the token")


def _proof(token: bytes, side: str, *what: Any) -> bytes:
    # msgpack says where each part ends, so no two different claims give the same bytes.
    return hmac.new(token, msgspec.msgpack.encode((side, *what)), hashlib.sha256).digest()
