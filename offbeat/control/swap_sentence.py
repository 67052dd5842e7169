"""The sentence that tells people of a plan swap, whoever decides about it: a server, or workers without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from offbeat.short_name import short_name
from offbeat.sync import StepsLocally

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.control.controller import Controller
    from offbeat.sync import Policy


class SwappedParts(Protocol):
    """The parts of a plan of which the sentence tells."""

    @property
    def sync(self) -> Policy: ...
    @property
    def controller(self) -> Controller | None: ...
    @property
    def is_tabled(self) -> bool: ...
    @property
    def digest(self) -> str: ...


def swap_sentence(
    old: SwappedParts,
    new: SwappedParts,
    *,
    since: str = "",
    until: str = "",
    where: str = "",
    reason: str = "",
    notes: Sequence[str] = (),
    agreed: str = "",
    took: str = "",
) -> str:
    """Say that `new` holds instead of `old`; what is empty is left out.

    Args:
        since: from when on, at the beginning of the sentence.
        until: from when on, in the middle of the sentence: what has to happen first.
        where: on which fabric, if that is another one.
        reason: of the controller that wanted it.
        notes: what else people should know.
        agreed, took: who wanted it, and how long it took; around the plans' digests.
    """
    text = f"{since}{short_name(new.sync)} decides when workers may go on{until}"
    text += "" if new.sync == old.sync else f", not {short_name(old.sync)} any more"
    text += f"{where}: {reason}" if reason else where
    notes = (*notes, *_of_momentum(old, new), *_of_controllers(old.controller, new.controller))
    text += "".join(f"; {note}" for note in notes)
    return f"{text} ({agreed}plan {new.digest[:12]}, was {old.digest[:12]}{took})."


def _of_momentum(old: SwappedParts, new: SwappedParts) -> Iterator[str]:
    if new.is_tabled and not _steps_by_itself(old):
        yield "each worker's own optimizer steps from then on, so that its momentum is that of its own gradients"
    if old.is_tabled and not _steps_by_itself(new):
        yield "momentum is that of all workers' gradients again"


def _steps_by_itself(parts: SwappedParts) -> bool:
    """Whether each worker's own optimizer steps on its own gradients."""
    return parts.is_tabled or isinstance(parts.sync, StepsLocally)


def _of_controllers(old: Controller | None, new: Controller | None) -> Iterator[str]:
    if old is not None and new != old:
        yield f"{short_name(old)} has let go of it"
    if new is not None and new != old:
        yield f"{short_name(new)} swaps it from now on"
