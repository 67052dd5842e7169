"""Draws docs/report.png, the report of a job that lost a worker: `python -m tests.docs.report_picture` (with chromium).

Its records are in `report_run`: of `offbeat run --workers 3 --fabric 'Elastic()' --run-dir digits examples/digits.py
--epochs 7`, whose third worker was killed some 60 steps on. The picture names the digest of the text that it shows, so
that a test notices when the report says something else.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from tests.cli.commands import offbeat

PICTURE = Path(__file__).parent.parent.parent / "docs" / "report.png"
_RUN = Path(__file__).parent / "report_run"
_WIDTH, _HEIGHT = 1100, 1400
_SIGNATURE, _END = b"\x89PNG\r\n\x1a\n", struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
_KEY = b"report"


def report(folder: Path) -> Path:
    """The report that offbeat makes of the records today."""
    run = folder / "digits"
    run.mkdir()
    shutil.copy(_RUN / "plan.toml", run)
    (run / "metrics.jsonl").write_bytes(gzip.decompress((_RUN / "metrics.jsonl.gz").read_bytes()))
    code, output = offbeat("report", run, folder=folder, variables={"TZ": "UTC"})
    assert code == 0, output
    return run / "report.html"


def shown_text(page: Path) -> str:
    """The words and figures of a report, without those of its style and of its scripts."""
    visible = re.sub(r"<(style|script)\b.*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", visible)).split())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest_in(picture: bytes) -> str:
    """The digest of the text that the picture was drawn from; "" if it does not say."""
    place = len(_SIGNATURE)
    while place < len(picture):
        (size,) = struct.unpack_from(">I", picture, place)
        kind, data = picture[place + 4 : place + 8], picture[place + 8 : place + 8 + size]
        if kind == b"tEXt" and data.startswith(_KEY + b"\0"):
            return data.partition(b"\0")[2].decode()
        place += size + 12
    return ""


def signed(picture: bytes, text: str) -> bytes:
    """A picture that names the digest of the text that it was drawn from."""
    assert picture.startswith(_SIGNATURE)
    assert picture.endswith(_END)
    chunk = b"tEXt" + _KEY + b"\0" + digest(text).encode()
    sealed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return picture[: -len(_END)] + sealed + _END


def draw() -> None:
    """Write the picture.

    Raises:
        SystemExit: if no browser is installed.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Cannot draw docs/report.png: there is no chromium. Install it (Debian: apt-get install chromium).")
    with tempfile.TemporaryDirectory() as private:
        page = report(Path(private))
        drawn = Path(private) / "report.png"
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={private}/profile"]
        size = f"--window-size={_WIDTH},{_HEIGHT}"
        subprocess.run(
            [browser, *options, size, f"--screenshot={drawn}", page.as_uri()], check=True, capture_output=True
        )
        PICTURE.write_bytes(signed(drawn.read_bytes(), shown_text(page)))


if __name__ == "__main__":
    draw()
