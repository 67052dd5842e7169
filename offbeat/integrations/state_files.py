"""The state of a run beside a framework's own checkpoints: what all have in common, and what each rank has alone.

    PREFIX.run.pt          `run.state_dict()`; the first worker writes it
    PREFIX.rank3-codec.pt  what the codec keeps at rank 3, such as residuals; each writes its own, if it keeps anything

A framework's checkpoints are in a folder that all workers see, and so are these.
"""

from __future__ import annotations

import io
import logging
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import ModelError
from offbeat.run import run_state
from offbeat.safe_write import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.run.run import Run


_log = logging.getLogger("offbeat")


def save(run: Run, prefix: str) -> None:
    """Write both, each whole or not at all. On every worker."""
    if run.is_validator:
        return
    if run.is_first:
        _write(_common(prefix), run.state_dict())
    if codec := run_state.codec_state(run._session):
        _write(_own(prefix, run.rank), {"step": run.step, "codec": codec})
    else:
        _own(prefix, run.rank).unlink(missing_ok=True)


def load(run: Run, prefix: str) -> None:
    """Go on from what `save` wrote, if it is there. Behind the model and its optimizer. Collective.

    Raises:
        ModelError: if it is damaged, or of another model or plan.
        DisagreementError: without a server, if the workers load different ones.
    """
    if not _common(prefix).exists():
        if run.is_first:
            _log.warning(
                "Going on without what the run had, such as what a server or a codec keeps: %s is not there.",
                _common(prefix),
            )
        return
    run.load_state_dict(_read(_common(prefix)))
    if not _own(prefix, run.rank).exists():
        return
    own = _read(_own(prefix, run.rank))
    if not isinstance(own, dict) or own.keys() != {"step", "codec"}:
        raise ModelError(
            f"Cannot go on from {_own(prefix, run.rank)}: it is not what a codec keeps. Resume from another "
            "checkpoint, or take the file away to go on without."
        )
    if own["step"] == run.step:
        run_state.load_codec_state(run._session, own["codec"])
    else:  # such as one of a job that had more workers
        _log.warning(
            "Rank %d goes on without what its codec kept: %s is of step %d, and the run of step %d.",
            *(run.rank, _own(prefix, run.rank), own["step"], run.step),
        )


def remove(prefix: str) -> None:
    """Delete what `save` wrote, of all ranks."""
    for path in [_common(prefix), *Path(prefix).parent.glob(f"{Path(prefix).name}.rank*-codec.pt")]:
        path.unlink(missing_ok=True)


def _common(prefix: str) -> Path:
    return Path(f"{prefix}.run.pt")


def _own(prefix: str, rank: int) -> Path:
    return Path(f"{prefix}.rank{rank}-codec.pt")


def _write(path: Path, state: Mapping[str, Any]) -> None:
    written = io.BytesIO()
    torch.save(state, written)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, written.getvalue())


def _read(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"Cannot go on from {path}: {str(error).splitlines()[0]}. Resume from another checkpoint."
        ) from error
