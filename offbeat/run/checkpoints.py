"""Checkpoints of a job as files: each is whole or not there, and one that is damaged is passed over, saying so.

    run-000120.pt          what the parts' `state_dict()` returned, by name, as `torch.save` writes it
    run-000120.rank3.rng   the state of rank 3's random generators, in the same way; each rank writes its own
    run-000120.rank3-codec.pt  what the codec keeps at rank 3, if it keeps anything, such as residuals; likewise
    run-000120.json        size and hash of the first; written last, so a checkpoint without it was never finished
    run-000120.rank3.json, run-000120.rank3-codec.json    likewise

A validator is no worker, and has none of these: its data is its own, and nothing that it holds moves the model.

All are written under another name and moved into place, as a job may be killed at any moment. That is done by a thread
while the training goes on, with a copy of the states; so the memory holds two of them meanwhile, and never more: a
checkpoint waits for the one before.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Protocol

import msgspec
import torch
from torch import nn
from xxhash import xxh3_128

from offbeat.engine import state_checks
from offbeat.errors import ModelError
from offbeat.run import run_state
from offbeat.run.background_writer import BackgroundWriter
from offbeat.run.replica import Replica
from offbeat.safe_read import UnreadableError, open_file, read_file
from offbeat.safe_write import sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from offbeat.run.run import Run

_log = logging.getLogger("offbeat")
_CHUNK_BYTES = 1 << 20
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Stateful(Protocol):
    """An object with a state: a model, an optimizer, a schedule."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


class _Seal(msgspec.Struct, frozen=True):
    """The seal of a file: its size and checksum.

    Args:
        world: how many workers there were; 0 if that was not noted.
    """

    size: _Count
    xxh3_128: str
    step: _Count
    world: _Count = 0


_seal = msgspec.json.Decoder(_Seal).decode


class Checkpoints:
    """A folder of checkpoints, each written whole and checked when it is loaded; all workers of a job see it.

    Args:
        run: what trains.
        folder: where they lie; made if it is not there.
        keep: so many are kept, the last that this run has saved; at least 2, as the newest may be found to be damaged.
            Those of later steps that others have left in the folder stay, which is said once.
        generators: whether each rank's random generators (Python's, NumPy's, torch's) go on where they were, too.
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

    def __init__(
        self, run: Run, folder: str | os.PathLike[str], *, keep: int = 2, generators: bool = True, **parts: Stateful
    ) -> None:
        if keep < 2:
            raise ValueError(f"Cannot keep {keep} checkpoints: the newest may be damaged. Keep at least 2.")
        if not parts or "run" in parts:
            raise ValueError(
                "Cannot make checkpoints without parts: name what is saved beside the run, as model=model."
            )
        self._run, self._folder, self._keep, self._generators = run, Path(folder), keep, generators
        self._parts = {name: part.module if isinstance(part, Replica) else part for name, part in parts.items()}
        self._saved: dict[int, None] = {}  # steps of which this run has saved a checkpoint, the last one last
        self._left_alone: set[int] = set()  # later steps, of others
        self._trouble = ""  # why the last one could not be written, as it was said
        self._writer = BackgroundWriter("offbeat-checkpoints")
        run._session.resources.callback(self._end)

    def save(self) -> Path | None:
        """Make a checkpoint; the file that it will be, or None if another worker writes it.

        Every worker calls it: the first writes what is the same for all, and each its own random generators. Where
        replicas differ (see `Run.settle`) settle before. The states are copied, and a thread writes them: it is there
        after `wait`, or the end of the run. If it cannot be written, that is said, once until one can, and the training
        goes on. A validator writes nothing.

        Raises:
            ModelError: if a part's state is such that `load` would refuse it.
        """
        if self._run.is_validator:  # its rank may be a worker's when the job is resumed
            return None
        path, run = self._folder / f"run-{self._run.step:06d}.pt", self._run
        states_of: dict[Path, Mapping[str, Any]] = {}
        if self._generators:
            states_of[_of_rank(path, run.rank)] = run.rng_state()
        if codec := run_state.codec_state(run._session):
            states_of[_codec_of(path, run.rank)] = codec
        if run.is_first:
            states = {name: part.state_dict() for name, part in self._parts.items()} | {"run": run.state_dict()}
            if why := state_checks.why_not(states):
                raise ModelError(
                    f"Cannot make a checkpoint of {', '.join(self._parts)}: {why}. Save less in its state."
                )
            states_of[path] = states
        step, world, is_first, rank = run.step, run.world, run.is_first, run.rank
        self.wait()  # before there are more copies
        copies = {where: _copy_of(states) for where, states in states_of.items()}

        def write() -> None:
            written = {where: self._write(where, states, step, world) for where, states in copies.items()}
            copies.clear()
            failed = {where: why for where, why in written.items() if why}
            self._tell_trouble(failed, path)
            if path not in failed:
                self._saved.pop(step, None)
                self._saved[step] = None
            self._remove_old(rank, step, is_first=is_first)

        self._writer.begin(write)
        return path if is_first else None

    def wait(self) -> None:
        """Wait until the last checkpoint is written, or it was said why it cannot be."""
        self._writer.wait()

    def _end(self) -> None:
        """The run ends: what is under way is written, and no failure of that keeps it from ending."""
        try:
            self.wait()
        except Exception as error:
            _log.warning("Cannot write the last checkpoint to %s: %s.", self._folder, _line(error))

    def load(self) -> bool:
        """Load the newest checkpoint that is whole; whether there is one. On every worker, after `prepare`.

        One that is damaged is passed over, and named. A worker that has joined a job has what the others have, and
        loads nothing. A rank whose random generators were not saved, or not whole, leaves them as they are, which is
        said. A validator loads the parts, and begins with generators and codec as the script has set them.

        Raises:
            ModelError: if all that are there are damaged, or the newest whole one is of another model or plan.
            DisagreementError: without a server, if the workers load different ones.
        """
        if self._run.has_joined:
            return False
        self.wait()
        damaged: dict[Path, str] = {}
        for path in self._paths():
            states = self._read(path)
            if isinstance(states, str):
                damaged[path] = states
                continue
            for name, part in self._parts.items():
                _load_part(name, part, states[name], path)
            self._run.load_state_dict(states["run"])
            if damaged and self._run.is_first:  # all have read them by now, as the run's part is loaded together
                _log.warning("Cannot resume from %s. Resuming from %s.", _told(damaged), path.name)
                _put_aside(damaged)
            if self._run.is_validator:
                return True
            self._load_codec(path)
            if self._generators:
                self._load_generators(path)
            return True
        if damaged:
            raise ModelError(
                f"Cannot resume from the checkpoints in {self._folder}: {_told(damaged)}. Move them away to begin "
                "anew, or put a whole one there."
            )
        return False

    # -- one file ------------------------------------------------------------------------------------------------

    def _write(self, path: Path, states: Mapping[str, Any], step: int, world: int) -> str:
        """Write a file and its seal; why it cannot be, or ""."""
        part, seal = path.with_name(f"{path.name}.part"), path.with_suffix(".json.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(states, file)
                os.fsync(file.fileno())
            with part.open("rb") as file:
                size, digest = _size_and_digest(file)
            seal.write_bytes(msgspec.json.encode(_Seal(size, digest, step, world)))
            path.with_suffix(".json").unlink(missing_ok=True)  # of one that was saved at this step before
            part.replace(path)
            seal.replace(path.with_suffix(".json"))
            sync_folder(self._folder)
        except (OSError, RuntimeError) as error:  # torch's writer has an error of its own for a full disk
            why = _why_not_written(error, self._folder)
            for left in (part, seal):
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            return why
        return ""

    def _tell_trouble(self, failed: Mapping[Path, str], checkpoint: Path) -> None:
        """Say why files of a checkpoint could not be written, unless that was said of the one before."""
        where = checkpoint if checkpoint in failed else next(iter(failed), checkpoint)
        why = failed.get(where, "")
        if why and why != self._trouble:
            _log.warning(
                "Cannot write the checkpoint %s: %s. Training continues; those before it are kept. This is said once, "
                "until one can be written.",
                where,
                why,
            )
        self._trouble = why

    def _read(self, path: Path) -> dict[str, Any] | str:
        """Read a checkpoint; why it cannot be used, in words, if it cannot be."""
        if isinstance(states := _contents(path), str):
            return states
        if states.keys() != {*self._parts, "run"}:
            raise ModelError(
                f"Cannot resume from {path}: it holds {', '.join(sorted(states))[:200]}, and this script saves "
                f"{', '.join(sorted({*self._parts, 'run'}))}. Name the same parts, or use another folder."
            )
        return states

    # -- each rank's random generators ---------------------------------------------------------------------------

    def _load_generators(self, path: Path) -> None:
        run, world = self._run, _world_of(path)
        lacking = [rank for rank in range(run.world) if _world_of(_of_rank(path, rank)) != world]
        if lacking and run.is_first:
            _log.warning(
                "Cannot restore the random numbers of rank %s: they were not saved with %s. Their generators stay "
                "as the script has set them.",
                ", ".join(map(str, lacking)),
                path.name,
            )
        if run.rank in lacking:
            return
        own = _of_rank(path, run.rank)
        try:
            state = _contents(own)
            if not isinstance(state, str):
                run.load_rng_state(state)
                return
            why = state
        except ValueError as error:  # a ModelError as well
            why = f"cannot be taken over: {_line(error)}"
        _log.warning(
            "Cannot restore the random numbers of rank %d from %s, which %s. Its generators stay as the script has "
            "set them.",
            run.rank,
            own.name,
            why,
        )

    # -- each rank's codec ---------------------------------------------------------------------------------------

    def _load_codec(self, path: Path) -> None:
        run, own = self._run, _codec_of(path, self._run.rank)
        saved = {_rank_of(seal) for seal in self._folder.glob(f"{path.stem}.rank*-codec.json")}
        if not saved:
            return
        if run.is_first and (lost := sorted(saved - set(range(run.world)))):
            _log.warning(
                "Cannot continue with the codec's state of rank %s: no worker has that rank now. What was not sent "
                "there yet is in no update.",
                ", ".join(map(str, lost)),
            )
        if run.is_first and (lacking := sorted(set(range(run.world)) - saved)):
            _log.warning(
                "Rank %s begins with no codec state: none was saved with %s.", ", ".join(map(str, lacking)), path.name
            )
        if run.rank not in saved:
            return
        state = _contents(own)
        if isinstance(state, str):
            _log.warning("Rank %d begins with no codec state: %s %s.", run.rank, own.name, state)
        else:
            run_state.load_codec_state(run._session, state)

    # -- the folder ----------------------------------------------------------------------------------------------

    def _paths(self) -> list[Path]:
        """List the checkpoints that were finished once, the newest first."""
        sealed = (path.with_suffix(".pt") for path in self._folder.glob("run-*.json"))
        return sorted((path for path in sealed if path.stem[4:].isdecimal()), key=_step_of, reverse=True)

    def _remove_old(self, rank: int, step: int, *, is_first: bool) -> None:
        """Remove what is older than what is kept: the first worker all, the others what they wrote themselves."""
        there = {_step_of(path): path for path in self._paths()}
        self._leave_alone({other for other in there if other > step}, is_first=is_first)
        mine = [one for one in reversed(self._saved) if one in there]
        others = [one for one in there if one not in self._saved and one not in self._left_alone]
        kept, old = (by_age := mine + others)[: self._keep], by_age[self._keep :]
        if len(kept) < self._keep:
            return
        whose = "*" if is_first else f"{rank}"
        own = [path.with_suffix(".rng") for path in self._folder.glob(f"run-*.rank{whose}.json")]
        own += [path.with_suffix(".pt") for path in self._folder.glob(f"run-*.rank{whose}-codec.json")]
        stay = self._left_alone.union(kept)
        for path in [
            *(there[one] for one in old if is_first),
            *(one for one in own if _step_of(one) < max(kept) and _step_of(one) not in stay),
        ]:
            for gone in (path.with_suffix(".json"), path):
                gone.unlink(missing_ok=True)

    def _leave_alone(self, later: set[int], *, is_first: bool) -> None:
        """Keep out of the way of checkpoints of later steps that this run has not saved; the first worker says so."""
        is_new = not self._left_alone
        self._left_alone = (self._left_alone | later) - self._saved.keys()
        if is_first and is_new and self._left_alone:
            _log.warning(
                "Cannot tell whose the checkpoints of later steps in %s are, up to run-%06d.pt: this run has not saved "
                "them. They stay, and the newest would be loaded next time. Use another folder, or remove them.",
                self._folder,
                max(self._left_alone),
            )


def _copy_of(states: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy that does not change any more, in the CPU's memory."""
    return copy.deepcopy(states, dict(_moved(states, {})))


def _moved(state: Any, moved: dict[tuple[Any, ...], torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Copies of tensors that `deepcopy` is not for, by their ids: on a GPU, where there may be no room; with a graph.

    Args:
        moved: what was copied so far; tensors that are one stay one.
    """
    if isinstance(state, torch.Tensor):
        if state.device.type != "cpu" or not state.is_leaf:
            key = (state.data_ptr(), state.dtype, state.shape, state.stride())
            if key not in moved:
                moved[key] = state.detach().to("cpu", copy=True)
            yield id(state), moved[key]
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _moved(value, moved)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _moved(value, moved)


def _load_part(name: str, part: Stateful, state: Any, path: Path) -> None:
    """Load a part's state.

    Raises:
        ModelError: if it is that of another model or optimizer.
    """
    try:
        part.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        if not isinstance(part, nn.Module | torch.optim.Optimizer):
            raise
        said = " ".join(str(error).split()).rstrip(".")[:200]
        why = _difference(part, state) or said if isinstance(part, nn.Module) else said
        raise ModelError(
            f"Cannot resume from {path}: it was written with another {name}: {why}. "
            f"Resume with the {name} that it was written with, or use another folder."
        ) from error


def _difference(module: nn.Module, state: Mapping[str, Any]) -> str:
    """Say which of a module's tensors differs from that of a state in shape, or is in one of them alone; else ""."""
    mine = module.state_dict()
    for name in (name for name in mine if name in state):
        here, there = getattr(mine[name], "shape", None), getattr(state[name], "shape", None)
        if here is not None and there is not None and here != there:
            return f"its {name} has shape {list(there)}, and here it has {list(here)}"
    if lacking := [name for name in mine if name not in state]:
        return f"it has no {lacking[0]}, which is here"
    if strange := [name for name in state if name not in mine]:
        return f"it has {strange[0]}, which is not here"
    return ""


def _told(damaged: Mapping[Path, str]) -> str:
    return "; ".join(f"{path.name}, which {why}" for path, why in damaged.items())


def _put_aside(damaged: Iterable[Path]) -> None:
    """Let them not count as the newest any more; what is left of them stays, under another name."""
    for path in damaged:
        with suppress(OSError):
            path.with_suffix(".json").unlink(missing_ok=True)
            path.replace(path.with_suffix(".pt.damaged"))


def _of_rank(path: Path, rank: int) -> Path:
    """The file of a rank's random generators that belongs to a checkpoint."""
    return path.with_suffix(f".rank{rank}.rng")


def _codec_of(path: Path, rank: int) -> Path:
    """The file of a rank's codec state that belongs to a checkpoint."""
    return path.with_suffix(f".rank{rank}-codec.pt")


def _rank_of(seal: Path) -> int:
    """The rank whose codec state a seal is of; -1 for another file."""
    number = seal.suffixes[0].removeprefix(".rank").removesuffix("-codec")
    return int(number) if number.isdecimal() else -1


def _step_of(path: Path) -> int:
    """The step at which a checkpoint was made, or what belongs to one; -1 for another file."""
    number = path.name[4:].partition(".")[0]
    return int(number) if number.isdecimal() else -1


def _world_of(path: Path) -> int | None:
    """The number of workers when a file was written; None if it was not finished."""
    try:
        return read_file(path.with_suffix(".json"), _seal).world
    except (OSError, UnreadableError):
        return None


def _contents(path: Path) -> dict[str, Any] | str:
    """Read a file; why it cannot be used, in words, if it cannot be.

    Raises:
        ModelError: if it is whole, and of a class that torch does not load unless it is told to.
    """
    try:
        told = read_file(path.with_suffix(".json"), _seal)
    except OSError as error:
        return f"has no seal that can be read ({error.strerror})"
    except UnreadableError as error:
        return f"has no seal that can be read ({error})"
    if told.step != _step_of(path):
        return f"has the seal of step {state_checks.shown(told.step)}"
    try:
        with open_file(path) as file:
            if (size := os.fstat(file.fileno()).st_size) != told.size:
                return f"has {size} bytes, not {state_checks.shown(told.size)}"
            if _size_and_digest(file) != (told.size, told.xxh3_128):
                return "has other contents than were written"
            file.seek(0)
            states = torch.load(file, weights_only=True, map_location="cpu")
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except Exception as error:  # with the right seal, so that it may be of use, if `save` has written it
        why = _line(error)
        if isinstance(error, pickle.UnpicklingError) and "Unsupported global" in why:
            raise ModelError(
                f"Cannot resume from {path}: {why}. Save only what torch.load(weights_only=True) takes, or allow the "
                "class with torch.serialization.add_safe_globals."
            ) from error
        return f"holds no checkpoint ({why})"
    if not isinstance(states, dict) or not all(type(name) is str for name in states):
        return "holds no checkpoint"
    return f"holds no checkpoint ({why})" if (why := state_checks.why_not(states)) else states


def _line(error: Exception) -> str:
    """The first line of an error; its name, if it has no text."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip()  # behind advice that nobody should follow
    return next(iter(text.splitlines()), "").rstrip(".")[:200] or type(error).__name__


def _why_not_written(error: OSError | RuntimeError, folder: Path) -> str:
    """Say why a file could not be written: torch's own error tells of its writer's place, and hides the disk's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    with suppress(OSError):
        if os.statvfs(folder).f_bavail == 0:
            return os.strerror(errno.ENOSPC)
    return _line(error)


def _size_and_digest(file: BinaryIO) -> tuple[int, str]:
    digest, size = xxh3_128(), 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()
