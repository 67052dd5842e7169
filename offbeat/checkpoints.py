"""Checkpoints of a job as files: each is whole or not there, and one that is damaged is passed over, saying so.

    run-000120.pt    what the parts' `state_dict()` returned, by name, as `torch.save` writes it
    run-000120.json  its size and hash; written last, so a checkpoint without it was never finished

Both are written beside and moved into place, as a job may be killed at any moment.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from xxhash import xxh3_128

from offbeat.errors import ModelError
from offbeat.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from offbeat.run import Run

_log = logging.getLogger("offbeat")
_CHUNK_BYTES = 1 << 20


class Part(Protocol):
    """What has a state: a model, an optimizer, a schedule."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


class _Seal(msgspec.Struct, frozen=True):
    """What a file has to be."""

    size: int
    xxh3_128: str
    step: int


class Checkpoints:
    """A folder of checkpoints, each written whole and checked when it is loaded; all workers of a job see it.

    Args:
        run: what trains.
        folder: where they lie; made if it is not there.
        keep: so many are kept, the newest; at least 2, as the newest may be found to be damaged.
        parts: what is saved beside the run: models, as they were or as `prepare` returned them, optimizers, schedules,
            and whatever else has `state_dict` and `load_state_dict`. All are loaded in this order, the run last.

    Raises:
        ValueError: if `keep` is less than 2, or there are no parts.

    >>> import offbeat, tempfile, torch
    >>> with offbeat.init() as run:
    ...     model = torch.nn.Linear(4, 2)
    ...     model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ...     checkpoints = offbeat.Checkpoints(run, tempfile.mkdtemp(), model=model, optimizer=optimizer)
    ...     loaded = checkpoints.load()
    ...     _ = model(torch.ones(1, 4)).sum().backward()
    ...     _ = optimizer.step()
    ...     print(loaded, checkpoints.save().name)
    False run-000001.pt
    """

    def __init__(self, run: Run, folder: str | os.PathLike[str], *, keep: int = 2, **parts: Part) -> None:
        if keep < 2:
            raise ValueError(f"Cannot keep {keep} checkpoints: the newest may be damaged. Keep at least 2.")
        if not parts or "run" in parts:
            raise ValueError(
                "Cannot make checkpoints without parts: name what is saved beside the run, as model=model."
            )
        self._run, self._folder, self._keep = run, Path(folder), keep
        self._parts = {name: part.module if isinstance(part, Replica) else part for name, part in parts.items()}

    def save(self) -> Path | None:
        """Write a checkpoint; the file, or None if another worker writes it, or it cannot be written, which is said.

        Every worker may call it. Where replicas differ (see `Run.settle`) settle before.
        """
        if not self._run.is_first:
            return None
        states = {name: part.state_dict() for name, part in self._parts.items()} | {"run": self._run.state_dict()}
        path = self._folder / f"run-{self._run.step:06d}.pt"
        part, seal = path.with_suffix(".pt.part"), path.with_suffix(".json.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(states, file)
                os.fsync(file.fileno())
            seal.write_bytes(msgspec.json.encode(_seal_of(part, self._run.step)))
            path.with_suffix(".json").unlink(missing_ok=True)  # of one that was saved at this step before
            part.replace(path)
            seal.replace(path.with_suffix(".json"))
            _sync_folder(self._folder)
        except (OSError, RuntimeError) as error:  # torch's writer has an error of its own for a full disk
            for left in (part, seal):
                left.unlink(missing_ok=True)
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
            _log.warning("Cannot write the checkpoint %s: %s. Training goes on; those before it are kept.", path, why)
            return None
        self._remove_old()
        return path

    def load(self) -> bool:
        """Load the newest checkpoint that is whole; whether there is one. On every worker, after `prepare`.

        One that is damaged is passed over, and named. A worker that has joined a job has what the others have, and
        loads nothing.

        Raises:
            ModelError: if all that are there are damaged, or the newest whole one is of another model or plan.
            DisagreementError: without a server, if the workers load different ones.
        """
        if self._run.has_joined:
            return False
        damaged: dict[Path, str] = {}
        for path in self._paths():
            states = self._read(path)
            if isinstance(states, str):
                damaged[path] = states
                continue
            for name, part in (*self._parts.items(), ("run", self._run)):
                part.load_state_dict(states[name])
            if damaged and self._run.is_first:  # all have read them by now, as the run's part is loaded together
                _log.warning("Cannot go on from %s. Going on from %s.", _told(damaged), path.name)
                _put_aside(damaged)
            return True
        if damaged:
            raise ModelError(
                f"Cannot go on from the checkpoints in {self._folder}: {_told(damaged)}. Move them away to begin anew, "
                "or put a whole one there."
            )
        return False

    def _read(self, path: Path) -> dict[str, Any] | str:
        """What is in a file; why it cannot be used, in words, if it cannot be."""
        try:
            told = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=_Seal)
        except (OSError, msgspec.DecodeError) as error:
            return f"has no seal that can be read ({error})"
        try:
            here = _seal_of(path, told.step)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        if here.size != told.size:
            return f"has {here.size} bytes, not {told.size}"
        if here != told:
            return "has other contents than were written"
        try:
            states: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:  # whole as it is, so it was written with what torch does not read back
            raise ModelError(
                f"Cannot go on from {path}: {str(error).splitlines()[0]} Save only what torch.load(weights_only=True) "
                "takes, or allow the class with torch.serialization.add_safe_globals."
            ) from error
        if states.keys() != {*self._parts, "run"}:
            raise ModelError(
                f"Cannot go on from {path}: it holds {', '.join(sorted(states))}, and this script saves "
                f"{', '.join(sorted({*self._parts, 'run'}))}. Name the same parts, or use another folder."
            )
        return states

    def _paths(self) -> list[Path]:
        """Those that were finished once, the newest first."""
        sealed = (path.with_suffix(".pt") for path in self._folder.glob("run-*.json"))
        return sorted(
            (path for path in sealed if path.stem[4:].isdecimal()), key=lambda p: int(p.stem[4:]), reverse=True
        )

    def _remove_old(self) -> None:
        for path in self._paths()[self._keep :]:
            for old in (path.with_suffix(".json"), path):
                old.unlink(missing_ok=True)


def _told(damaged: Mapping[Path, str]) -> str:
    return "; ".join(f"{path.name}, which {why}" for path, why in damaged.items())


def _put_aside(damaged: Iterable[Path]) -> None:
    """Let them not count as the newest any more; what is left of them stays, under another name."""
    for path in damaged:
        with suppress(OSError):
            path.with_suffix(".json").unlink(missing_ok=True)
            path.replace(path.with_suffix(".pt.damaged"))


def _seal_of(path: Path, step: int) -> _Seal:
    digest, size = xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return _Seal(size, digest.hexdigest(), step)


def _sync_folder(folder: Path) -> None:
    """Have the names survive as well."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
