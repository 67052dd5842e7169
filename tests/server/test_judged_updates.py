"""Updates that a rule judges before they are made: at two shards of one model, with the coordinator's part of it."""

from __future__ import annotations

import logging
import re
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.coordinator.instructions import AppendHistory, SendToShards
from offbeat.coordinator.job_record import JobRecord
from offbeat.coordinator.judgements import Judgements
from offbeat.coordinator.model_record import ModelRecord
from offbeat.coordinator.policy_runner import PolicyRunner
from offbeat.errors import PeerError, PlanError
from offbeat.history import UpdateJudged, UpdateMade
from offbeat.layout import arrange
from offbeat.protocol.shards import (
    AdmitWorker,
    ApplyContributions,
    CommitUpdates,
    MeasuredContribution,
    ScaleContributions,
    UpdateMeasured,
    WithdrawContribution,
    WorkerRemoved,
)
from offbeat.protocol.training import BlockOf, ContributionInfo, DensePayload, ModelInfo, PieceOf
from offbeat.robust import (
    FABA,
    Bulyan,
    CentredClipping,
    ClippedMean,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    Rule,
    TrimmedMean,
    ZenoPlusPlus,
    ZenoPS,
    ZenoPSAsync,
)
from offbeat.server.blocks import cut
from offbeat.server.judge import Judge
from offbeat.server.optimizers import describe, hyper
from offbeat.server.pushed_block import PushedBlock
from offbeat.server.shard.model_shard import ModelShard
from offbeat.server.shard.shard_parts import ShardParts
from offbeat.short_name import short_name
from offbeat.sync import BSP, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.history import Record
    from offbeat.sync import Push

NUMEL, BLOCKS = 24, 6
VALIDATOR = 9


class Together:
    """Two shards with three blocks each, of one parameter that SGD moves by an update as it is."""

    def __init__(self, rule: Rule | None, workers: int = 7) -> None:
        parameter = torch.nn.Parameter(torch.zeros(NUMEL))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        self.hyper = hyper(optimizer)
        self.cut = cut(arrange({"a": parameter.data}, bucket_bytes=1 << 20), 4 * NUMEL // BLOCKS)
        assert len(self.cut) == BLOCKS
        self.reports: list[UpdateMeasured] = []
        self.records: list[Record] = []
        self.model_shards = []
        for held in (self.cut[::2], self.cut[1::2]):
            of = tuple(BlockOf(b.index, b.dtype, tuple(PieceOf(0, p.start, p.numel) for p in b.pieces)) for b in held)
            details = ModelInfo(1, 2, 2, "p", "l", ("a",), of, describe(optimizer, {id(parameter): "a"}))
            model_shard = ModelShard(
                0,
                details,
                lambda *_: None,
                parts=ShardParts(rule),
                report=self.reports.append,
                record=self.records.append,
            )
            for block in held:
                model_shard.values(block.index).zero_()
            self.model_shards.append(model_shard)
        self.job = JobRecord()
        runner = PolicyRunner(BSP(), workers, lambda: 0.0, State(version=1000))
        self.job.models[0] = ModelRecord(runner, details.optimizer, 2, 0, 2)
        judge = self.model_shards[0].judge
        self.judgements = Judgements(self.job, lambda _, rows, gram, losses: judge(rows, gram, losses))
        self.clocks: dict[int, int] = {}
        for worker in (*range(workers), VALIDATOR, VALIDATOR + 1):
            self.clocks[worker] = 0
            self.decide(AdmitWorker(0, worker, 0))

    def decide(self, decision: Any) -> None:
        for model_shard in self.model_shards:
            model_shard.decide(decision)

    def apply(
        self,
        brings: dict[int, torch.Tensor],
        *,
        weights: dict[int, float] | None = None,
        hypers: dict[int, Any] | None = None,
        references: tuple[int, ...] = (),
        in_order: bool = True,
        is_short: bool = False,
    ) -> list[Push]:
        """The decision about an update, and its contributions but for the commit."""
        pushes = tuple((worker, self.clocks[worker]) for worker in brings)
        about = tuple(ContributionInfo((weights or {}).get(w, 1.0), (hypers or {}).get(w, ())) for w in brings)
        self.decide(ApplyContributions(0, pushes, about, self.hyper, 1.0, in_order, references, is_short))
        for push in pushes:
            self.clocks[push[0]] += 1
            for block in self.cut:
                part = brings[push[0]][block.offset : block.offset + block.numel].clone()
                self.model_shards[block.index % 2].arrive(push, block.index, PushedBlock(DensePayload(), part))
        return list(pushes)

    def judge(self) -> list[UpdateJudged]:
        """Hear all that shards have measured, and have them make what is judged."""
        judged = []
        while self.reports:
            self.judgements.measured(self.reports.pop())
            for instruction in self.job.out.take():
                if isinstance(instruction, SendToShards):
                    self.decide(instruction.decision)
                elif isinstance(instruction, AppendHistory):
                    assert isinstance(instruction.record, UpdateJudged)
                    judged.append(instruction.record)
        return judged

    def update(self, brings: dict[int, torch.Tensor], **how: Any) -> torch.Tensor:
        """A whole update; by how much it has moved the parameter."""
        before = self.values
        for push in self.apply(brings, **how):
            self.decide(CommitUpdates(0, *push))
        self.judge()
        return before - self.values

    @property
    def values(self) -> torch.Tensor:
        return torch.cat([self.model_shards[b.index % 2].values(b.index) for b in self.cut])


def gradients(count: int, seed: int = 1) -> dict[int, torch.Tensor]:
    """Of honest workers, and the last one lies."""
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(NUMEL, generator=generator)
    honest = {i: center + 0.3 * torch.randn(NUMEL, generator=generator) for i in range(count)}
    return {**honest, count - 1: -6 * honest[count - 1]}


def stacked(brings: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(brings.values()))


@pytest.fixture
def told() -> Any:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    yield texts
    logging.getLogger("offbeat").removeHandler(handler)


# -- what is made ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [Krum(1), MultiKrum(1), MultiKrum(1, best=2), Bulyan(1), GeometricMedian(), ClippedMean(), FABA(1)],
    ids=repr,
)
def test_two_shards_make_what_the_rule_makes_of_the_whole(rule: Rule) -> None:
    job, brings = Together(rule), gradients(7)
    weights = {i: float(1 + i % 3) for i in brings}
    for seed in (1, 2):
        brings = gradients(7, seed)
        moved = job.update(brings, weights=weights)
        torch.testing.assert_close(moved, rule(stacked(brings), list(weights.values())), rtol=1e-5, atol=1e-6)
        assert float(moved.norm()) < 12, "where the mean is not"


def test_the_update_before_is_what_centred_clipping_goes_by() -> None:
    rule = CentredClipping(radius=1.0)
    job, before = Together(rule), torch.zeros(NUMEL)
    for seed in range(4):
        brings = gradients(5, seed)
        expected = rule(stacked(brings), reference=before)
        before = job.update(brings)
        torch.testing.assert_close(before, expected, rtol=1e-5, atol=1e-5)


def test_what_is_rejected_is_recorded_with_the_scale_0_and_moves_nothing() -> None:
    job, brings = Together(MultiKrum(1, best=2)), gradients(5)
    for push in job.apply(brings):
        job.decide(CommitUpdates(0, *push))
    (judged,) = job.judge()
    scales = {worker: scale for worker, _, scale in judged.scales}
    assert sorted(scales.values()) == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert scales[4] == 0.0
    made = [record for record in job.records if isinstance(record, UpdateMade)]
    assert [{used.worker: used.scale for used in one.used} for one in made] == [scales, scales]
    assert all(used.blocks == 3 for one in made for used in one.used)


# -- when it is made ---------------------------------------------------------------------------------------------------


def test_nothing_is_measured_before_all_contributions_are_committed() -> None:
    job, brings = Together(Krum(1)), gradients(5)
    first, *others = job.apply(brings)
    for push in others:
        job.decide(CommitUpdates(0, *push))
    assert not job.reports
    job.decide(CommitUpdates(0, *first))
    assert [report.version for report in job.reports] == [1, 1]
    assert not job.values.any()
    job.judge()
    assert job.values.any()


def test_a_contribution_that_is_withdrawn_is_not_judged() -> None:
    job, brings = Together(MultiKrum(1)), gradients(6)
    first, *others = job.apply(brings)
    for push in others:
        job.decide(CommitUpdates(0, *push))
    job.decide(WorkerRemoved(0, 0))
    job.decide(WithdrawContribution(0, *first))
    assert [[row.worker for row in report.rows] for report in job.reports] == [[1, 2, 3, 4, 5]] * 2
    job.judge()
    del brings[0]
    torch.testing.assert_close(-job.values, MultiKrum(1)(stacked(brings)), rtol=1e-5, atol=1e-6)


def test_an_update_whose_contributions_are_all_withdrawn_counts_and_changes_nothing() -> None:
    job = Together(Krum(1))
    for push in job.apply({0: torch.ones(NUMEL)}):
        job.decide(WithdrawContribution(0, *push))
    assert [judged.scales for judged in job.judge()] == [()]
    assert not job.values.any()
    assert float(job.update(gradients(5)).norm()) > 0, "the next one is made"


def test_updates_in_order_wait_for_those_before() -> None:
    job = Together(Krum(1))
    first, second = job.apply(gradients(5)), job.apply(gradients(5, 2))
    for push in (*second, *first):
        job.decide(CommitUpdates(0, *push))
    assert [report.version for report in job.reports] == [1, 1]
    assert [judged.version for judged in job.judge()] == [1, 2]


def test_updates_without_order_do_not_wait() -> None:
    job = Together(ClippedMean())
    slow, fast = job.apply({0: torch.ones(NUMEL)}, in_order=False), job.apply({1: torch.ones(NUMEL)}, in_order=False)
    job.decide(CommitUpdates(0, *fast[0]))
    assert [judged.version for judged in job.judge()] == [2]
    job.decide(CommitUpdates(0, *slow[0]))
    assert [judged.version for judged in job.judge()] == [1]
    assert torch.equal(-job.values, torch.full((NUMEL,), 2.0))


# -- what cannot be judged ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_rejected_whole_though_it_is_in_one_block(value: float, told: list[str]) -> None:
    job, brings = Together(GeometricMedian()), gradients(5)
    brings[2][3] = value
    moved = job.update(brings)
    del brings[2]
    torch.testing.assert_close(moved, GeometricMedian()(stacked(brings)), rtol=1e-5, atol=1e-6)
    job.update({**gradients(5), 2: torch.full((NUMEL,), value)})
    assert told == ["What rank 2 pushes holds NaN or Inf, and is rejected."]


def test_what_weighs_nothing_has_no_row() -> None:
    job, brings = Together(MultiKrum(1)), gradients(6)
    brings[0].fill_(float("nan"))
    moved = job.update(brings, weights={0: 0.0})
    del brings[0]
    torch.testing.assert_close(moved, MultiKrum(1)(stacked(brings)), rtol=1e-5, atol=1e-6)


def test_too_few_leave_the_model_as_it_is_and_that_is_said_once(told: list[str]) -> None:
    job = Together(Krum(2))
    for seed in range(3):
        assert not job.update(gradients(5, seed)).any()
    (text,) = told
    assert text.startswith("Updates are left out: Krum(faulty=2) needs at least 7 contributions, and there are 5.")


@pytest.mark.parametrize("rule", [Krum(2), TrimmedMean(2)], ids=repr)
def test_what_the_coordinator_has_said_is_not_said_again(rule: Rule, told: list[str]) -> None:
    job = Together(rule)
    assert not job.update(gradients(4), is_short=True).any()
    assert not told
    assert not job.update(gradients(3)).any()
    assert told, "of others, such as fewer, it is"


@pytest.mark.parametrize("rule", [Krum(1), Median(), None], ids=repr)
def test_one_that_lies_about_hyper_parameters_is_outvoted_also_if_it_is_the_first(rule: Rule | None) -> None:
    job, brings = Together(rule), gradients(5)
    lie, truth = ({**job.hyper[0], "lr": 1e9},), job.hyper
    job.hyper = lie  # what the decision has is what the first one names
    moved = job.update(brings, hypers=dict.fromkeys(range(1, 5), truth))
    if rule is None:
        assert float(moved.norm()) > 1e6, "a mean goes by what the first one names"
    else:
        torch.testing.assert_close(moved, rule(stacked(brings)), rtol=1e-5, atol=1e-6)


# -- references --------------------------------------------------------------------------------------------------------


def reference(seed: int = 1) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def in_blocks(rule: Rule, brings: dict[int, torch.Tensor], trusted: torch.Tensor) -> torch.Tensor:
    """What the rule makes of each block by itself."""
    parts = stacked(brings).split(NUMEL // BLOCKS, 1), trusted.split(NUMEL // BLOCKS)
    return torch.cat([rule(part, reference=of) for part, of in zip(*parts, strict=True)])


def whole(rule: Rule, brings: dict[int, torch.Tensor], trusted: torch.Tensor) -> torch.Tensor:
    return rule(stacked(brings), reference=trusted)


RULES: list[tuple[Any, Callable[[Rule, dict[int, torch.Tensor], torch.Tensor], torch.Tensor]]] = [
    (FLTrust(), whole),
    *((rule, whole) for rule in (ZenoPS(rho=20.0), ZenoPSAsync(), ZenoPlusPlus())),
    *((replace(rule, scope="block"), in_blocks) for rule in (ZenoPS(rho=20.0), ZenoPSAsync(), ZenoPlusPlus())),
]


@pytest.mark.parametrize(("rule", "expected"), RULES, ids=lambda one: getattr(one, "__name__", repr(one)))
def test_a_reference_is_compared_with_and_never_applied(
    rule: Rule, expected: Callable[..., torch.Tensor], told: list[str]
) -> None:
    job = Together(rule)
    assert not job.update(gradients(5)).any(), "without any reference an update is left out"
    assert set(told) == {f"Updates are left out: the reference that {short_name(rule)} needs has not come yet."}, (
        "once a shard"
    )
    assert not job.update({VALIDATOR: reference(1)}, references=(VALIDATOR,)).any()
    for seed in (1, 2):  # the latest holds until another one comes
        brings = gradients(5, seed)
        torch.testing.assert_close(job.update(brings), expected(rule, brings, reference(1)), rtol=1e-4, atol=1e-5)
    brings = gradients(5, 3)
    trusted = {VALIDATOR: reference(1), VALIDATOR + 1: 3 * reference(1)}
    moved = job.update({**brings, **trusted}, references=tuple(trusted))
    torch.testing.assert_close(moved, expected(rule, brings, 2 * reference(1)), rtol=1e-4, atol=1e-5)
    brings = gradients(5, 4)
    torch.testing.assert_close(job.update(brings), expected(rule, brings, 2 * reference(1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rule", "expected"), RULES, ids=lambda one: getattr(one, "__name__", repr(one)))
def test_a_reference_that_is_not_finite_takes_no_other_s_place(
    rule: Rule, expected: Callable[..., torch.Tensor], told: list[str]
) -> None:
    job, brings, broken = Together(rule), gradients(5), torch.full((NUMEL,), float("nan"))
    job.update({VALIDATOR: reference(1)}, references=(VALIDATOR,))
    job.update({VALIDATOR: broken}, references=(VALIDATOR,))
    torch.testing.assert_close(job.update(brings), expected(rule, brings, reference(1)), rtol=1e-4, atol=1e-5)
    assert not job.update({**brings, VALIDATOR: broken}, references=(VALIDATOR,)).any(), "it has no other of its own"
    assert set(told) == {f"Updates are left out: the reference that {short_name(rule)} needs holds NaN or Inf."}


def test_references_say_nothing_about_hyper_parameters_and_are_recorded_with_the_scale_0() -> None:
    job, brings = Together(FLTrust()), gradients(3)
    wild = ({**job.hyper[0], "lr": 1e9},)
    trusted = {VALIDATOR: reference(1), VALIDATOR + 1: reference(1)}
    moved = job.update({**brings, **trusted}, hypers=dict.fromkeys(trusted, wild), references=tuple(trusted))
    torch.testing.assert_close(moved, whole(FLTrust(), brings, reference(1)), rtol=1e-4, atol=1e-5)
    used = {one.worker: one.scale for record in job.records if isinstance(record, UpdateMade) for one in record.used}
    assert [used[worker] for worker in trusted] == [0.0, 0.0]


def test_a_block_that_is_undone_has_the_reference_that_it_had() -> None:
    """Where each block is judged by itself a reference may be there, in part, when its worker is lost."""
    rule = ZenoPSAsync(scope="block", alpha=1.0)
    job = Together(rule)
    job.update({VALIDATOR: reference(1)}, references=(VALIDATOR,), in_order=False)
    (push,) = job.apply({VALIDATOR: reference(2)}, references=(VALIDATOR,), in_order=False)
    brings = gradients(1)
    ((worker, clock),) = job.apply(brings, in_order=False)
    torch.testing.assert_close(-job.values, in_blocks(rule, brings, reference(2)), rtol=1e-4, atol=1e-5)
    job.decide(WorkerRemoved(0, VALIDATOR))
    job.decide(WithdrawContribution(0, *push))
    job.decide(CommitUpdates(0, worker, clock))
    torch.testing.assert_close(-job.values, in_blocks(rule, brings, reference(1)), rtol=1e-4, atol=1e-5)


def test_parameters_that_are_put_have_no_reference_yet() -> None:
    job, rule = Together(FLTrust()), FLTrust()
    job.update({VALIDATOR: reference(1)}, references=(VALIDATOR,))
    assert job.update(gradients(3)).any()
    for model_shard in job.model_shards:
        for block in model_shard.blocks:
            model_shard._store.forget_state(block)
    assert not job.update(gradients(3)).any(), repr(rule)


@pytest.mark.parametrize("make", [ZenoPS, ZenoPSAsync, ZenoPlusPlus])
def test_a_scope_is_the_model_or_a_block(make: Any) -> None:
    assert [make(scope=scope).judges_model for scope in ("model", "block")] == [True, False]
    with pytest.raises(
        PlanError, match=re.escape("Cannot judge by 'shard': choose 'model' or 'block' - at `plan.validator.scope`.")
    ):
        make(scope="shard")


# -- what shards say of it ---------------------------------------------------------------------------------------------


def measured(
    gram: Sequence[float], version: int = 1, workers: Sequence[int] = (0, 1), reference: int = 0
) -> UpdateMeasured:
    rows = tuple(MeasuredContribution(worker, 0, 1.0) for worker in workers)
    return UpdateMeasured(0, version, rows, struct.pack(f"<{len(gram)}d", *gram), reference)


GRAM = [1.0, 0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ([measured(GRAM, version=1001)], "measured update 1001 of model 0, which does not wait"),
        ([measured(GRAM), measured(GRAM, workers=(0, 2))], "measured other contributions to update 1"),
        ([measured(GRAM[:3])], "Cannot judge 2 contributions by 24 bytes"),
        ([measured(GRAM, workers=(0,) * 4)], "Cannot judge 4 contributions by 32 bytes"),
        ([measured([1.0, float("nan"), 0.5, 1.0])], "not finite beside its diagonal"),
        ([measured([1.0, float("inf"), 0.5, 1.0])], "not finite beside its diagonal"),
        ([measured([float("-inf"), 0.5, 0.5, 1.0])], "not finite beside its diagonal"),
        ([measured([float("nan"), 0.5, 0.5, 1.0])], "not finite beside its diagonal"),
    ],
)
def test_what_no_shard_may_say_is_refused(said: list[UpdateMeasured], says: str) -> None:
    job = Together(Krum(1))
    *before, last = said
    for message in before:
        job.judgements.measured(message)
    with pytest.raises(PeerError, match=says):
        job.judgements.measured(last)


def test_without_a_rule_that_compares_nothing_is_judged() -> None:
    job = Together(Median())
    job.judgements.measured(measured(GRAM))
    with pytest.raises(PeerError, match="its plan has no rule that does"):
        job.judgements.measured(measured(GRAM))
    for rule in (Median(), Krum(1)):
        with pytest.raises(PeerError, match="Cannot make update 7 of model 0: it does not wait for that"):
            Together(rule).decide(ScaleContributions(0, 7, ()))


def test_no_more_updates_wait_than_there_is_memory_for() -> None:
    job = Together(Krum(1))
    job.job.models[0].runner.state = State(version=5000)
    for version in range(1, 1025):
        job.judgements.measured(measured(GRAM, version=version))
    with pytest.raises(PeerError, match="which does not wait"):
        job.judgements.measured(measured(GRAM, version=1025))


def test_shards_that_have_seen_other_references_judge_nothing() -> None:
    job = Together(ClippedMean())
    for version in (3, 4):
        job.judgements.measured(measured(GRAM, reference=version))
    decisions = [one.decision for one in job.job.out.take() if isinstance(one, SendToShards)]
    assert decisions == [ScaleContributions(0, 1, ((0, 0, 0.0), (1, 0, 0.0)))]


def sums(parts: Sequence[UpdateMeasured]) -> list[float]:
    """The Gram matrix that is judged of these parts."""
    job, got = Together(ClippedMean()), list[float]()
    job.job.models[0].holders = len(parts)

    def judge(_: int, rows: Sequence[MeasuredContribution], gram: Sequence[float], __: object) -> Sequence[float]:
        got.extend(gram)
        return [0.0] * len(rows)

    judgements = Judgements(job.job, judge)
    for message in parts:
        judgements.measured(message)
    return got


def test_a_sum_over_shards_does_not_depend_on_who_came_first() -> None:
    parts = [measured([value, 0.1, 0.1, value]) for value in (1e16, 1.0, 1.0)]
    for order in (parts, parts[::-1], parts[1:] + parts[:1]):
        assert sums(order) == [1e16 + 2, 0.30000000000000004, 0.30000000000000004, 1e16 + 2]


def test_a_norm_that_does_not_fit_is_infinite() -> None:
    assert sums([measured([1.5e308, 0.0, 0.0, 1.0])] * 2) == [float("inf"), 0.0, 0.0, 2.0]


def test_what_is_next_to_nothing_is_rejected_and_stops_no_server() -> None:
    """Brought to the reference's norm it would be multiplied by more than a number can be."""
    said: list[str] = []
    judge = Judge(ZenoPlusPlus(), said.append)
    tiny, own = 1e-40, 1.0
    gram = torch.tensor([[1.0, 0.0, 1.0], [0.0, tiny**2, tiny], [1.0, tiny, own]], dtype=torch.float64)
    scales = judge.scales(gram, [0, 1], [1.0, 1.0])
    assert scales[0] > 0
    assert scales[1] == 0
    assert said == ["What rank 1 pushes is next to nothing, and is rejected."]
