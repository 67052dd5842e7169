"""Compile the switch's program for this machine; once, and again when its source or its sizes change."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from offbeat.errors import NetworkError
from offbeat.safe_write import write_whole

SOURCE = Path(__file__).with_name("switch.bpf.c")
_SAID_BYTES = 2000


def compile_program(sizes: dict[str, int], cache: Path | None = None, source: Path = SOURCE) -> Path:
    """Compile the program for jobs of these sizes; its object file.

    Args:
        sizes: what is defined when it is compiled; see `switch.bpf.c`.
        cache: a folder for object files; None for `offbeat` in the user's cache.
        source: of the program.

    Raises:
        NetworkError: if this machine cannot compile it; says what is missing.
    """
    if sys.byteorder != "little":
        raise NetworkError("Cannot sum in this machine's kernel: it is big-endian. Use --target udp.")
    clang = shutil.which("clang")
    if clang is None:
        raise NetworkError(
            "Cannot build the switch's kernel program: clang is not installed. Install it (on Debian: "
            "apt install clang libbpf-dev), or use --target udp."
        )
    flags = [
        "-O2", "-g", "-Wall", "-Wno-parentheses", "-target", "bpf", "-mcpu=v3",
        f"-I/usr/include/{platform.machine()}-linux-gnu", *(f"-D{name}={size}" for name, size in sizes.items()),
    ]  # fmt: skip
    text = source.read_bytes()
    digest = hashlib.sha256(text + " ".join([clang, *flags]).encode()).hexdigest()[:16]
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat"
    found = folder / f"{source.name.partition('.')[0]}-{digest}.o"
    if found.exists():
        return found
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run([clang, *flags, "-c", "-x", "c", "-", "-o", "-"], input=text, capture_output=True)
    if made.returncode:
        said = made.stderr.decode(errors="replace")
        if "bpf/bpf_helpers.h" in said or "bpf/bpf_endian.h" in said or "linux/" in said:
            raise NetworkError(
                "Cannot build the switch's kernel program: headers are missing. Install them (on Debian: "
                f"apt install libbpf-dev linux-libc-dev), or use --target udp. clang said: {said[:_SAID_BYTES]}"
            )
        raise NetworkError(f"Cannot build the switch's kernel program. clang said: {said[:_SAID_BYTES]}")
    write_whole(found, made.stdout)
    return found
