"""What is read of a peer's message is whole before anybody goes by it."""

from __future__ import annotations

import msgspec
import pytest

from offbeat.errors import PeerError
from offbeat.protocol.messages import details_of, pack
from offbeat.protocol.training import BlockOf, PieceOf
from tests.server.garbage_peer import DETAILS


@pytest.mark.parametrize(("name", "is_there"), [(1, True), (2, False), (99, False)])
def test_a_piece_of_no_parameter_is_refused(name: int, is_there: bool) -> None:
    block = BlockOf(0, "float32", (PieceOf(name, 0, 4),))
    body = pack(msgspec.structs.replace(DETAILS, blocks=(block,)))
    if is_there:
        assert details_of(body).blocks == (block,)
    else:
        with pytest.raises(PeerError, match="a piece belongs to no parameter"):
            details_of(body)
