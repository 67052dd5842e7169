"""The check that a policy decides from the state alone.

A fault here shows seldom and late: what a policy keeps to itself is lost by a swap or a restart of the server, and a
clock or a dictionary's order is another one on another machine. So it is asked about one state several times.
"""

from __future__ import annotations

import datetime
import gc
import sys
import time
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from offbeat.sync.state import changed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.sync import Policy, State

_CLOCKS = {
    getattr(time, name)
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "sleep")
    for name in (name, f"{name}_ns")
    if hasattr(time, name)
}


def impurity(policy: Policy, fresh: Policy, state: State) -> str:
    """Say what is wrong with how `policy` decides about `state`, as half a sentence; "" if nothing is.

    Args:
        fresh: a copy of the policy that has never been asked; it is not asked here either, but copied.
    """
    before = deepcopy(state)
    with _Ears() as ears:
        first = list(policy.decide(state))
    if before != state:
        return "it changed the state it was asked about: use Remember(...) for what is to be kept"
    if ears.heard:
        return f"it asks {ears.heard} for the time: the time of the last event is `state.now_s`"
    if first != (second := list(policy.decide(state))):
        return f"it is not pure: asked twice about one state it decided {first} and {second}"
    if first != (second := list(deepcopy(fresh).decide(state))):
        return (
            f"it keeps something to itself, which a swap loses: it decided {first}, and a copy of it that was never "
            f"asked before {second}. Keep it in the state, with Remember(...)"
        )
    if first != (second := list(policy.decide(_turned(state)))):
        return (
            f"it depends on the order of a dictionary: it decided {first}, and with `state.members` and "
            f"`state.pending` in another order {second}. Go through them sorted"
        )
    return ""


class _Ears:
    """A context that notes the first clock that is asked while it is entered; none under a profiler, which listens
    there itself.

    The garbage collector rests meanwhile: who is called by it (finalizers, `gc.callbacks`: Hypothesis times it) would
    be taken for the policy.
    """

    heard = ""

    def __enter__(self) -> _Ears:
        self._collects = gc.isenabled()
        gc.disable()
        self._listens = sys.getprofile() is None
        if self._listens:
            sys.setprofile(self._listen)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._listens:
            sys.setprofile(None)
        if self._collects:
            gc.enable()

    def _listen(self, frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and not self.heard and _is_clock(called):
            self.heard = f"{getattr(called, '__module__', None) or 'datetime'}.{called.__name__}()"


def _is_clock(called: Any) -> bool:
    owner = getattr(called, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return called.__name__ in ("now", "utcnow", "today")
    return owner is time and called in _CLOCKS


def _turned(state: State) -> State:
    """The same state, with what it maps in the opposite order."""
    return changed(state, **{name: _reversed(getattr(state, name)) for name in ("members", "pending", "past", "away")})


def _reversed(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    return dict(reversed(list(mapping.items())))
