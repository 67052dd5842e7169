"""Law 2, where parameters are not only the sum of contributions: what one worker put there, all took over together.

A server lets the first worker replace what it has, as loading a checkpoint does. Each worker writes down by itself that
it loads one. So what was put there behind the others' backs stands in the server's history, and in nobody else's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from offbeat.audit.findings import AuditResult
    from offbeat.audit.replicas import WorkerHistory
    from offbeat.history import ParametersReplaced


def check_replaced(
    replaced: Iterable[tuple[int, ParametersReplaced]], histories: Sequence[WorkerHistory], result: AuditResult
) -> None:
    """Hold what the server says was replaced against what workers say they loaded.

    Args:
        replaced: with the server's life; several shards may say the same.
    """
    for life, one in dict.fromkeys(replaced):
        if not one.version:
            continue  # nothing had been trained: whoever comes first brings the parameters
        result.replaced += not one.is_data
        loaded = [history for history in histories if _loaded_there(history, life, one)]
        there = [history for history in histories if _was_there(history, life, one)]
        what = "the place in the data" if one.is_data else "the parameters"
        said = f"Rank {one.worker} replaced {what} of model {one.model} at version {one.version} of life {life}"
        if not there and not loaded:
            result.notes.append(f"{said}; no worker's history says whether all loaded a checkpoint there.")
        for history in there:
            if history not in loaded:
                result.violated(
                    2, f"{said}, and rank {history.rank} loaded no checkpoint there, as {history.file} says."
                )
                break


def _was_there(history: WorkerHistory, life: int, one: ParametersReplaced) -> bool:
    """Whether it had parameters of before, and has some of after that."""
    versions = [
        max(has.versions[:2]) for has in history.has if (has.model, has.life) == (one.model, life) and has.versions
    ]
    return any(version < one.version for version in versions) and any(version > one.version for version in versions)


def _loaded_there(history: WorkerHistory, life: int, one: ParametersReplaced) -> bool:
    """Whether what it had next, after some checkpoint that it loaded, was that version."""
    for load in history.loads:
        following = (has for has in history.has[load:] if has.model == one.model)
        has = next(following, None)
        if has is not None and has.life == life and one.version in has.versions[:2]:
            return True
    return False
