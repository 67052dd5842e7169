"""Collective questions beside the data's path: are we the same, who has data, what is the mean.

Every question begins with a vector of one fixed size that says which question it is. So workers that ask different
ones find out at once, and by name; on the bare process group tensors of different sizes would meet, which ends a Gloo
process through C++ terminate, or the wrong numbers would be added.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from offbeat.diagnosis.wait import WaitContext
from offbeat.engine.rank_bits import bit_of, ranks_in
from offbeat.errors import DisagreementError
from offbeat.payload import Gather, GatheredPart, Sum, Total

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.fabric import Fabric

    EqualityCheck = Callable[[str, str, str], None]

_MAX_TEXT_BYTES = 64 << 20
_NUMBERS = 2
_BITS = 52  # of an exact integer in float64
# The square of a question's number, summed over 4096 workers, is exact in float64.
_QUESTIONS = 1 << 20


class ControlGroup:
    """The worker's end of the control group.

    Args:
        fabric: carries sums and gathers of CPU tensors; nobody else uses it.
        waiter: the one waiting primitive.
        members: ranks that take part now, in order; None for all.

    Attributes:
        newcomer_check: called by `check_equal` instead of asking all workers: this one is not among them yet.
        checks_made: what was compared so far: the thing, the text, the advice.
        before_question: called before each question: nothing else of this worker's is to be under way then.
    """

    def __init__(
        self, fabric: Fabric, waiter: BlockingWait, members: Callable[[], Sequence[int]] | None = None
    ) -> None:
        self._fabric, self._waiter, self._members = fabric, waiter, members
        self.rank, self.world = fabric.rank, fabric.world
        self.newcomer_check: EqualityCheck | None = None
        self.checks_made: list[tuple[str, str, str]] = []
        self.before_question: list[Callable[[], None]] = []

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take part now, in order."""
        return tuple(range(self.world)) if self._members is None else tuple(self._members())

    @property
    def leader(self) -> int:
        """Rank of the one that does for all what one has to do."""
        return self.members[0]

    @property
    def is_leader(self) -> bool:
        """Whether this worker does for all what one has to do."""
        return self.rank == self.leader

    def sum(self, question: str, numbers: Sequence[float] = ()) -> list[float]:
        """The sum over all workers of up to two numbers. Collective.

        Args:
            question: what is asked, in words for people; equal on every rank.

        Raises:
            DisagreementError: if the workers ask different questions.
        """
        assert len(numbers) <= _NUMBERS
        for settle in self.before_question:
            settle()
        number = zlib.crc32(question.encode()) % _QUESTIONS
        vector = torch.zeros(2 + _NUMBERS, dtype=torch.float64)
        vector[:2] = torch.tensor([number, number**2], dtype=torch.float64)
        vector[2 : 2 + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        reply = self._waiter.wait(self._fabric.start(Sum(vector)), WaitContext(question))
        assert isinstance(reply, Total)
        first, second, *sums = reply.tensor.tolist()
        # All numbers are equal if and only if their variance is zero.
        if int(second) * round(reply.weight * self.world) != int(first) ** 2:
            self._disagree(question)
        return sums[: len(numbers)]

    def texts(self, question: str, text: str) -> dict[int, str]:
        """The `text` of every worker that takes part, by rank, in their order. Collective.

        Raises:
            DisagreementError: if the workers ask different questions, or a rank's text is not what this function sends.
        """
        self.sum(question)
        return self._gather(question, text)

    def tensors(self, question: str, tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        """The `tensor` of every worker that takes part, by rank, in their order. Collective.

        Args:
            tensor: on the CPU; of one dtype on all, its shapes may differ.

        Raises:
            DisagreementError: if the workers ask different questions.
        """
        self.sum(question)
        reply = self._waiter.wait(self._fabric.start(Gather((tensor,))), WaitContext(question))
        assert isinstance(reply, list)
        return {contribution.worker: contribution.tensors[0] for contribution in reply}

    def ranks_that(self, question: str, flag: bool) -> tuple[int, ...]:
        """The ranks of the workers whose `flag` is set, in their order. Collective.

        Raises:
            DisagreementError: if the workers ask different questions.
        """
        return tuple(self.numbers_of(question, 0 if flag else None))

    def numbers_of(self, question: str, number: int | None) -> dict[int, int]:
        """The `number` of each worker that brings one, by rank, in their order; all bring the same. Collective.

        In a group that keeps its workers one sum says who does, and what: of different numbers it gives the mean.

        Raises:
            DisagreementError: if the workers ask different questions.
        """
        if self._members is not None or self.world > _BITS:
            texts = self.texts(question, "" if number is None else str(number))
            return {rank: int(text) for rank, text in texts.items() if text}
        mine: tuple[float, ...] = (0.0, 0.0) if number is None else (*bit_of(self.rank, _BITS), float(number))
        flags, numbers = self.sum(question, mine)
        ranks = ranks_in((flags,), _BITS)
        return {rank: int(numbers) // len(ranks) for rank in ranks}

    def check_equal(self, what: str, text: str, advice: str) -> None:
        """Compare `text` between all ranks, line by line. Collective.

        Args:
            what: the thing compared, such as "model".
            text: lines; equal on all ranks if all is well.
            advice: what to do when they differ.

        Raises:
            DisagreementError: naming the ranks that differ from the majority and the first line in which they do.
        """
        self.checks_made.append((what, text, advice))
        if self.newcomer_check is not None:
            self.newcomer_check(what, text, advice)
            return
        self.check_equal_now(what, text, advice)

    def check_equal_now(self, what: str, text: str, advice: str) -> None:
        """Compare as `check_equal` does, but among the present workers alone: those that join later are not asked.
        Collective.
        """
        texts = self.texts(f"the comparison of the {what}", text)
        if len(set(texts.values())) == 1:
            return
        odd, usual = odd_ones(texts)
        theirs, ours = first_difference(texts[odd[0]], texts[usual])
        ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
        raise DisagreementError(
            f"The {what} differs between workers: {ranks} against rank {usual}. First difference: "
            f"rank {odd[0]} has {theirs!r}, rank {usual} has {ours!r}. {advice}"
        )

    def broadcast(self, question: str, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor` with that of rank `source`. Collective."""
        self._waiter.wait(self._fabric.broadcast(tensor, source), WaitContext(question))

    def _gather(self, question: str, text: str) -> dict[int, str]:
        data = torch.frombuffer(bytearray(zlib.compress(text.encode())), dtype=torch.uint8)
        reply = self._waiter.wait(self._fabric.start(Gather((data,))), WaitContext(question))
        assert isinstance(reply, list)
        return {contribution.worker: _unpack(contribution) for contribution in reply}

    def _disagree(self, question: str) -> None:
        questions = self._gather("the comparison after a disagreement", question)
        odd, usual = odd_ones(questions)
        where = " and ".join(f"rank {rank} is at {questions[rank]}" for rank in odd)
        raise DisagreementError(
            f"The workers disagree about where they are: {where}, rank {usual} at {questions[usual]}. Let every worker "
            "call prepare, load checkpoints, iterate over the loader, call run.mean and close equally often and in the "
            "same order."
        )


def odd_ones(texts: Mapping[int, str]) -> tuple[list[int], int]:
    """The ranks whose text differs from the majority's, and the first rank of the majority."""
    said = list(texts.values())
    majority = max(said, key=said.count)
    return [rank for rank, text in texts.items() if text != majority], next(r for r in texts if texts[r] == majority)


def _unpack(contribution: GatheredPart) -> str:
    inflate = zlib.decompressobj()
    data = contribution.tensors[0].numpy().tobytes()
    try:
        return inflate.decompress(data, _MAX_TEXT_BYTES).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise DisagreementError(
            f"Rank {contribution.worker} sent something unreadable ({error}): do all workers run the same offbeat?"
        ) from error


def first_difference(theirs: str, ours: str) -> tuple[str, str]:
    """The first line in which two texts differ, of each."""
    left, right = theirs.splitlines(), ours.splitlines()
    for a, b in zip(left, right, strict=False):
        if a != b:
            return a, b
    longer = min(len(left), len(right))
    return (left[longer] if len(left) > longer else "nothing"), (right[longer] if len(right) > longer else "nothing")
