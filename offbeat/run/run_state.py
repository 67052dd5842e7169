"""The state that a run saves in a checkpoint beside model and optimizer, and how it resumes from that."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from offbeat.engine import state_checks
from offbeat.errors import ModelError, OffbeatError, PlanError
from offbeat.loading import position
from offbeat.plan import Plan
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from offbeat.run.session import WorkerSession

_log = logging.getLogger("offbeat")
MOST_SEEDS = 1 << 64
_MOST_SHOWN = 4096  # characters of a plan


def state_dict(session: WorkerSession) -> dict[str, Any]:
    """Plan, step, place in the data, and the codec's state."""
    return {
        "plan": session.plan.to_toml(),
        "seed": session.seed,
        "models": [one.state_dict() for one in session.models.synchronizers],
        "loaders": session.data.state_dict(),
    }


def load_state_dict(session: WorkerSession, state: Mapping[str, Any]) -> None:
    """Take over what `state_dict` returned; see `offbeat.Run.load_state_dict`. Collective."""
    context, server = session.context, session.server
    if session.came_with:
        if session.models.digests() != session.came_with:  # its replica would not be theirs, and nothing would say so
            raise ModelError(
                f"Cannot load a checkpoint as rank {context.rank}: this worker has just joined with what the others "
                "have, and its script has put other values in their place. Have it load nothing where "
                "run.has_joined, as offbeat.Checkpoints does."
            )
        _log.warning("Rank %d has joined with what the others have; the checkpoint is left as it is.", context.rank)
        return
    is_new = context.joins and not (context.is_validator and server is not None and not server.version(0))
    if is_new and server is not None and not session.models.step:  # it would wait for ever
        raise ModelError(
            f"Cannot load a checkpoint as rank {context.rank}: this worker has just joined a job that trains, whose "
            "workers do not load one now. Have its script load nothing where run.has_joined."
        )
    try:
        _take_over(session, state)
    except Exception as error:
        if server is not None:  # where the others wait
            why = str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}"
            with suppress(OffbeatError):
                server.take_over(session.waiter, why)
        raise
    if server is not None:
        server.take_over(session.waiter)
    context.history.record_loaded()
    if server is not None:
        for one in session.models.synchronizers:
            one.refreshed()
    wanted = server is None and session.plans.wants_vote(looks=context.is_first)
    for one in session.models.together:
        one.accounting.requests_vote = wanted


def codec_state(session: WorkerSession) -> dict[str, Any]:
    """The state that the codec keeps on this worker, such as what was not sent yet; empty if it keeps nothing."""
    states = [one.codec_state_dict() for one in session.models.synchronizers]
    return {"models": states} if any(states) else {}


def load_codec_state(session: WorkerSession, state: Mapping[str, Any]) -> None:
    """Take over what `codec_state` returned on a worker of this rank; behind `load_state_dict`.

    Raises:
        ModelError: if it is damaged, or of other models.
    """
    try:
        for synchronizer, one in zip(session.models.synchronizers, state["models"], strict=True):
            synchronizer.load_codec_state_dict(one)
    except OffbeatError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise state_checks.damaged(error) from error


def _take_over(session: WorkerSession, state: Mapping[str, Any]) -> None:
    seed = _check(session, state)
    models = session.models
    try:
        _compare_plans(session, state["plan"])
        session.seed = seed
        for synchronizer, one in zip(models.synchronizers, state["models"], strict=True):
            synchronizer.load_state_dict(one)
        if not session.context.is_validator:  # whose data is its own
            session.data.load_state_dict(state["loaders"], seed=seed)
        if session.server is None and session.context.world > 1:
            _compare_states(session, state)  # behind all that one may refuse, so that the others hear of it
    except KeyError as error:
        raise ModelError(
            f"Cannot load this state: it has no {state_checks.shown(error.args[0])}, which this plan needs. Resume "
            f"with the plan that it was written with, and with the same model. It was\n{_cut(state['plan'])}"
        ) from error
    except OffbeatError:
        raise
    except (TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError) as error:
        raise state_checks.damaged(error) from error


def _check(session: WorkerSession, state: Mapping[str, Any]) -> int:
    """See that it is the state of a run with as many models and loaders; its seed."""
    if not isinstance(state, Mapping):
        raise state_checks.damaged(TypeError(f"it is a {type(state).__name__}, not a dict"))
    if why := state_checks.why_not(state):
        raise state_checks.damaged(ValueError(why))
    if lacked := [name for name in ("plan", "seed", "models", "loaders") if name not in state]:
        raise ModelError(f"Cannot load this state: it has no {lacked[0]!r}. It is damaged, or no run.state_dict().")
    here = (("models", len(session.models)), ("loaders", len(session.data.loaders)))
    for what, number in here:
        if not isinstance(state[what], (list, tuple)):
            raise state_checks.damaged(TypeError(f"its {what} are a {type(state[what]).__name__}, not a list"))
        if len(state[what]) != number:
            raise ModelError(
                f"Cannot load this state: it has {len(state[what])} {what}, this run {number}. "
                "Prepare the same models and loaders before load_state_dict."
            )
    if not isinstance(state["plan"], str):
        raise state_checks.damaged(TypeError(f"its plan is a {type(state['plan']).__name__}, not a text"))
    return state_checks.whole(state["seed"], "seed", least=-(MOST_SEEDS >> 1), most=MOST_SEEDS - 1)


def _compare_states(session: WorkerSession, state: Mapping[str, Any]) -> None:
    """See that all workers go on from the same place, and with the same parameters if they have to. Collective."""
    models = session.models
    lines = [f"seed {state['seed']}"]
    lines += [f"step {one['step']} of model {number}" for number, one in enumerate(state["models"])]
    lines += [f"{position.describe(one)} of loader {number}" for number, one in enumerate(state["loaders"])]
    lines += [f"layout {one.layout.digest[:16]} of model {number}" for number, one in enumerate(models.synchronizers)]
    lines += [line for one, synchronizer in models.pairs() for line in one.digests(synchronizer.in_common)]
    session.context.control.check_equal_now(
        "checkpoint",
        "\n".join(lines),
        "Load the same file on every worker: the model, the optimizer and run.load_state_dict, in this order.",
    )


def _compare_plans(session: WorkerSession, written: str) -> None:
    try:
        saved = Plan.from_toml(written)
    except PlanError:  # with a part that is not offbeat's own, or not any more
        if written != session.plan.to_toml():
            _log.warning("The checkpoint was written with another plan:\n%s", _cut(written))
        return
    session.plans.go_on_from(saved)
    for name, (here, there) in session.plan.diff(saved).items():
        _log.warning(
            "The checkpoint was written with %s=%s; this run continues with %s.",
            name, short_name(there), short_name(here),
        )  # fmt: skip


def _cut(plan: str) -> str:
    """A plan from a file, to be shown: it may be anything."""
    return plan if len(plan) <= _MOST_SHOWN else f"{plan[:_MOST_SHOWN]} ..."
