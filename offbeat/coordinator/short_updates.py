"""Updates of fewer contributions than their rule needs, which leave the model as it is: what people are told of them.

Where workers have data of different lengths, as in the last round of leased data, the last updates are of those that
still have some. Nobody is lost then, and more workers would not help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from offbeat.coordinator.job_record import JobRecord
    from offbeat.coordinator.model_record import ModelRecord
    from offbeat.protocol.training import ContributionInfo
    from offbeat.sync import Push


class ShortUpdates:
    """The short updates of one job."""

    def __init__(self, job: JobRecord) -> None:
        self._job = job

    def decided(self, one: ModelRecord, brought: Mapping[Push, ContributionInfo]) -> bool:
        """Tell people of an update that was decided, if it is short; whether it is.

        Args:
            brought: what it is to be made of, with references.
        """
        rule = self._job.rule
        samples = {push[0]: about.weight for push, about in brought.items() if push[0] not in self._job.validators}
        given = {worker: weight for worker, weight in samples.items() if weight > 0}
        if rule is None or not given:
            return False
        if not (why := rule.check(len(given))):
            self.end(one)
            return False
        silent = self._without_data(one) | (samples.keys() - given.keys())
        if rule.check(len(given) + len(silent - given.keys())):
            if why not in one.told_short:
                one.told_short.add(why)
                self._job.out.log(f"Updates are left out: {why}.")
            return True
        if not one.left_out:
            self._job.out.log(
                f"An update is left out: nothing came to it from {_ranks(silent - given.keys())}, as at the end of its "
                f"data, and {rule!r} needs at least {rule.least()} contributions. The {sum(given.values()):g} samples "
                f"of {_ranks(given.keys())} are in no update."
            )
        one.left_out.append(sum(given.values()))
        return True

    def end(self, one: ModelRecord) -> None:
        """Say what was left out, unless that is said: enough workers contribute again, or none does any more."""
        if len(one.left_out) > 1:
            self._job.out.log(
                f"In all {len(one.left_out)} updates were left out because of that, of {sum(one.left_out):g} samples."
            )
        one.left_out.clear()

    def _without_data(self, one: ModelRecord) -> Set[int]:
        """The workers that are done, or have stepped out: nothing comes from them, and they are not lost."""
        runner = one.runner
        done = {worker for worker, counts in runner.records.items() if counts.end == "done"}
        return (runner.state.away.keys() | done) - runner.state.members.keys() - self._job.validators


def _ranks(workers: Set[int]) -> str:
    return f"rank {', '.join(map(str, sorted(workers)))}"
