"""`offbeat bench codec`: it measures what it says, and what it says stands in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.cli.commands import offbeat

if TYPE_CHECKING:
    from pathlib import Path

FAST = ("--model", "transformer-small", "--seconds", "0", "--repeats", "2", "--workers", "4")


@pytest.mark.slow
def test_what_is_measured_stands_in_the_file(tmp_path: Path) -> None:
    asked = ("Dense()", "Cast()", "TopK(0.01)", "GRBS(8)", "PowerSGD(2)", "ErrorFeedback(Sign())")
    code, output = offbeat("bench", "codec", *asked, *FAST, "--json", "codec.json", folder=tmp_path)
    assert code == 0, output
    report = msgspec.json.decode((tmp_path / "codec.json").read_bytes())
    rows = {row["codec"]: row for row in report["rows"]}
    assert len(rows) == len(asked)
    for row in rows.values():
        assert len(row["values"]) == 2
        assert min(row["values"]) <= row["median"] <= max(row["values"])
    assert report["settings"]["model"] == "transformer-small"
    dense, cast = rows["Dense()"], rows["Cast(dtype='bf16')"]
    assert (dense["sent"], dense["pays_below_gbit_s"]) == (1.0, None)
    assert cast["sent"] == cast["on_wire"] == 0.5
    assert cast["pays_below_gbit_s"] == pytest.approx(8 * 1.5 * 0.5 * cast["median"])
    top, blocks = rows["TopK(ratio=0.01)"], rows["GRBS(ratio=8.0, block=256)"]
    assert top["sent"] == pytest.approx(0.02, rel=0.01)
    assert top["on_wire"] == pytest.approx(2 * top["sent"]), "three others' contributions, in place of 3/2 of one's own"
    assert blocks["sent"] == blocks["on_wire"] == pytest.approx(1 / 8)
    assert "pays below" in output


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for asked, says in (
        (("TopK(2)",), "at most 1"),
        (("Nothing()",), "Unknown"),
        (("--device", "tpu"), "neither 'cpu' nor 'cuda'"),
        (("--json", "no/such/folder.json"), "there is no folder"),
    ):
        code, output = offbeat("bench", "codec", *asked, folder=tmp_path)
        assert code == 2, output
        assert says in " ".join(output.split())
