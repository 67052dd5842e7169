"""`Plan`: the one frozen thing that is composed, checked, digested, diffed, run and saved.

A plan is made of parts, one per question: `sync` (when may a worker go on?), `codec` (what is sent?), `fabric` (where
is it summed?). Objects, not strings; names exist only in TOML, in one table at the end of this file.

>>> from offbeat.codec import Cast
>>> plan = Plan(codec=Cast("bf16"))
>>> eval(repr(plan)) == plan
True
>>> print(plan.to_toml())
bucket_bytes = 26214400
nonfinite = "pass"
keeps = "local_batch"
<BLANKLINE>
[sync]
kind = "BSP"
<BLANKLINE>
[codec]
kind = "Cast"
dtype = "bf16"
<BLANKLINE>
[fabric]
kind = "ProcessGroup"
<BLANKLINE>
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import math
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import tomli_w

from offbeat import toml_reader
from offbeat.batching import KEEPS, BatchTuning, Keeps
from offbeat.codec import (
    GRBS,
    QSGD,
    Carry,
    Cast,
    Codec,
    Dense,
    ErrorFeedback,
    ErrorReset,
    FixedPoint,
    LookAhead,
    OneRoundCodec,
    PowerSGD,
    Promises,
    RandomK,
    Sign,
    TopK,
    innermost,
)
from offbeat.collective import (
    HDRM,
    BidirectionalRing,
    CollectiveMethod,
    DoubleBinaryTree,
    FlatTree,
    Greedy,
    HalvingDoubling,
    MultiTree,
    PipelinedTrees,
    RecursiveDoubling,
    Ring,
    Ring2D,
    WaterFilling,
)
from offbeat.control import AdaptQuorum, ByProgress, Controller, WaitThreshold
from offbeat.errors import PlanError, brief
from offbeat.fabric import (
    Elastic,
    FabricSpec,
    InMemory,
    ObjectStore,
    ParameterServer,
    ProcessGroup,
    Routed,
    Served,
    Switch,
    check_spec,
)
from offbeat.privacy import GaussianMechanism
from offbeat.protocol.shards import MOST_COMPARED
from offbeat.robust import (
    FABA,
    Bulyan,
    CentredClipping,
    ClippedMean,
    FLTrust,
    GeometricMedian,
    Krum,
    MeaMed,
    Mean,
    Median,
    MultiKrum,
    Phocas,
    Rule,
    TooFew,
    TrimmedMean,
    Zeno,
    ZenoPlusPlus,
    ZenoPS,
    ZenoPSAsync,
)
from offbeat.scheduling import FIFO, Credit, MergedGradient, Priority, Prophet, ReduceScatterGather, Scheduler
from offbeat.short_name import short_name
from offbeat.switch.strategy import compile_policy
from offbeat.sync import (
    ASP,
    BSP,
    DSSP,
    SSP,
    Hybrid,
    KSync,
    LocalSGD,
    Policy,
    RoundRobin,
    StepsLocally,
    TakesTurns,
    check_workers,
    own_steps,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from offbeat.sync.policy import Contributes

Nonfinite = Literal["pass", "raise", "skip"]
_LOOKED_AT = range(1000)  # steps
_LARGE_VARIANCE = 8.0  # in units of the square of the gradient's norm
# Left out at their default, so that older plans keep their digest.
_CAME_LATER = frozenset({"calibrate", "delay", "fragments", "too_few", "wait_s"})
_NONFINITE: tuple[Nonfinite, ...] = typing.get_args(Nonfinite)
_TOO_FEW: tuple[TooFew, ...] = typing.get_args(TooFew)


@dataclass(frozen=True)
class Plan:
    """A frozen description of how a job trains: policy, codec, fabric, batches, controller.

    The default is DistributedDataParallel's behaviour, bit for bit with two workers.

    Args:
        sync: when a worker may go on.
        codec: what is sent.
        fabric: where it is summed.
        bucket_bytes: size at which a bucket of gradients is closed and sent.
        nonfinite: what to do when a gradient, a worker's own or the mean, holds NaN or Inf: "pass" it on as DDP does,
            "raise" `NumericsError` on every rank, or "skip" the optimizer step on every rank. Where workers go on by
            themselves (a server, `LocalSGD`), what one brings is looked at by itself: that worker raises, or its part
            is left out, and said to be.
        tuning: how batches follow the machines' speed; None for batches as large as the loader says.
        keeps: what stays as it is when workers come and go, if batches are not tuned: the "local_batch" of each worker,
            or the "global_batch", which they share.
        controller: decides that another policy than `sync` decides; None if only people do.
        scheduling: in what order and in what portions gradients are sent, hidden behind the next forward pass as well
            as behind backward; None for buckets that are waited for at the end of backward, and where `barrier_reason`
            says why they are with a scheduler, too. With a server, in what order they are pushed while backward
            computes; parameters come back during the next forward pass.
        rule: what a server makes of the contributions of an update, some of which may lie; None for their mean. One
            that compares whole contributions has each update held until all of it is there, at all shards.
        validator: the rule by which a server judges contributions beside those of validators, which compute on data
            that is trusted (`offbeat run --validator`) and never move the model themselves; None for no validators.
        too_few: what to do when so many workers are lost that fewer take part than `rule` needs: "skip" updates, which
            leave the model as it is, "hold" them until more workers come, or "raise" `PeerError` on all workers. When
            the last validator is lost updates are held, also with "skip": nothing is ever applied that was not judged.
        privacy: how each worker clips and noises what it contributes to a server, before it is encoded, so that nobody
            has to be trusted with it; None for contributions as they are.

    Raises:
        PlanError: if the parts cannot work together; the plan is checked when it is made.
    """

    sync: Policy = field(default_factory=BSP)
    codec: Codec = field(default_factory=Dense)
    fabric: FabricSpec = field(default_factory=ProcessGroup)
    bucket_bytes: int = 25 << 20
    nonfinite: Nonfinite = "pass"
    tuning: BatchTuning | None = None
    keeps: Keeps = "local_batch"
    controller: Controller | None = None
    scheduling: Scheduler | None = None
    rule: Rule | None = None
    validator: Rule | None = None
    privacy: GaussianMechanism | None = None
    too_few: TooFew = "skip"

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check that the parts can work together.

        Raises:
            PlanError: with what cannot be, why, and a way out.
        """
        for name, protocol in (("sync", "replicated"), ("codec", "promises"), ("fabric", "offers")):
            part = getattr(self, name)
            if isinstance(part, type) or not hasattr(part, protocol):
                raise PlanError(
                    f"Cannot use {short_name(part)} as {name}: it is no {name} part. "
                    f"Use one of {', '.join(sorted(_KINDS[name]))}, made with () - at `plan.{name}`."
                )
        for f in dataclasses.fields(self):
            if not isinstance(part := getattr(self, f.name), type):  # which is refused below, in its own words
                toml_reader.check_values(_to_table(part), "plan", f"plan.{f.name}", PlanError)
        check_spec(self.fabric)
        local = isinstance(self.sync, StepsLocally)
        if isinstance(self.sync, LocalSGD) and self.sync.policy is not None and not self.is_served:
            raise PlanError(
                f"Cannot use {short_name(self.sync)} on {short_name(self.fabric)}: only a server takes the changes of "
                "workers that go on at their own pace. Use fabric=ParameterServer(), or policy=None - at "
                "`plan.sync.policy`."
            )
        if not local and any(self.sync.contributes(step) != "gradient" for step in _LOOKED_AT):
            raise PlanError(
                f"Cannot use {short_name(self.sync)} on any fabric: with it workers step by themselves, which only "
                "LocalSGD can have them do. Use LocalSGD(...) for all workers, or a policy in which every step "
                "contributes its gradient, such as KSync(k) - at `plan.sync`."
            )
        if isinstance(self.sync, StepsLocally) and self.sync.loss_class == "delayed":
            self._check_delayed(self.sync)
        if self.is_tabled:
            self._check_table()
        elif self.has_quorum:
            self._check_quorum()
        elif not self.sync.replicated and not self.is_served:
            raise PlanError(
                f"Cannot use {short_name(self.sync)} on {short_name(self.fabric)}: with it each worker proceeds at "
                "its own pace, and this fabric adds up one contribution of every worker at once. Use "
                "fabric=ParameterServer(), or a policy in which all workers contribute to the same update, such as "
                "BSP() - at `plan.sync`."
            )
        if self.fabric.offers.holds == "switch" and innermost(self.codec) != Dense():
            raise PlanError(
                f"Cannot use {short_name(self.codec)} on {short_name(self.fabric)}: a switch adds float32: use "
                "Dense(), since all else would go around it - at `plan.codec`."
            )
        if isinstance(self.fabric, Served) and self.fabric.collocated and self._takes_single_turns:
            raise PlanError(
                f"Cannot use {short_name(self.sync)} on {short_name(self.fabric)}: in the turn of one worker the "
                "links of all others, and of the shards beside them, would be idle. Use slots=, as many as there are "
                "workers or a little less, BSP(), or shards of their own - at `plan.sync.slots`."
            )
        missing = self.codec.needs - self.fabric.offers.carries
        if missing and not self.is_served:  # a server decodes, whatever kind of payload that is elsewhere
            needs, carries = _kinds(missing), _kinds(self.fabric.offers.carries)
            raise PlanError(
                f"Cannot use {short_name(self.codec)} on {short_name(self.fabric)}: it needs {needs}, this fabric "
                f"carries only {carries}. Use a codec of that kind, or a fabric that carries it, such as "
                "ProcessGroup() - at `plan.codec`."
            )
        self._check_codec()
        if not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
            raise PlanError(
                f"Cannot fill buckets of {self.bucket_bytes!r} bytes: a bucket holds at least one byte. "
                "The default is 26214400 (25 MiB) - at `plan.bucket_bytes`."
            )
        if self.nonfinite not in _NONFINITE:
            raise PlanError(
                f"Cannot treat NaN and Inf with {self.nonfinite!r}: choose one of {', '.join(_NONFINITE)} "
                "- at `plan.nonfinite`."
            )
        if self.tuning is not None and not isinstance(self.tuning, BatchTuning):
            raise PlanError(
                f"Cannot tune batches with {short_name(self.tuning)}: use BatchTuning() or None - at `plan.tuning`."
            )
        if self.keeps not in KEEPS:
            raise PlanError(
                f"Cannot keep the {self.keeps!r} when workers join and leave: choose one of {', '.join(KEEPS)} "
                "- at `plan.keeps`."
            )
        if self.controller is not None:
            self._check_controller(self.controller)
        if self.scheduling is not None:
            self._check_scheduling(self.scheduling)
        if self.too_few not in _TOO_FEW or (self.too_few != "skip" and self.judging_rule is None):
            why = "without rule= or validator= an update may be of any number of contributions: use too_few='skip'"
            choices = f"choose one of {', '.join(_TOO_FEW)}"
            raise PlanError(
                f"Cannot treat too few contributions with {self.too_few!r}: "
                f"{why if self.too_few in _TOO_FEW else choices} - at `plan.too_few`."
            )
        if self.rule is not None:
            self._check_rule(self.rule)
        if self.validator is not None:
            self._check_validator(self.validator)
        if self.privacy is not None:
            self._check_privacy(self.privacy)

    def _check_privacy(self, privacy: GaussianMechanism) -> None:
        if not isinstance(privacy, GaussianMechanism):
            raise PlanError(
                f"Cannot protect contributions by {short_name(privacy)}: use GaussianMechanism(max_norm=1.0, "
                "noise=1.0), or None - at `plan.privacy`."
            )
        lacking = (
            (
                self.is_served,
                f"on {short_name(self.fabric)} the first parts of a gradient leave before the norm of the whole is "
                "known: use fabric=ParameterServer()",
            ),
            (
                not self.codec.promises.offset,
                f"with {short_name(self.codec)} what is not sent stays in a worker's own parameters, and its noise "
                "would be clipped, and noised, with the next contribution: use ErrorFeedback(...)",
            ),
            (
                self.scheduling is None,
                f"with {short_name(self.scheduling)} blocks are pushed before the norm of all of them is known: use "
                "scheduling=None",
            ),
            (
                not isinstance(self.rule, CentredClipping) or self.rule.radius is None,
                f"with {short_name(self.rule)} all contributions are cut, since noise is in their distances and not "
                "in the radius: use CentredClipping(), which goes by their median",
            ),
        )
        if why := next((text for is_met, text in lacking if not is_met), None):
            raise PlanError(f"Cannot use {short_name(privacy)}: {why} - at `plan.privacy`.")
        if self.validator is not None and self.validator.needs_reference:
            self._check_validator_of_noise(self.validator, privacy)

    def _check_validator_of_noise(self, rule: Rule, privacy: GaussianMechanism) -> None:
        """See that it is known how much noise there is in what a rule holds against a reference."""
        promises = self.codec.promises
        lacking = (
            (
                innermost(self.codec) == self.codec,
                f"with {short_name(self.codec)} noise of earlier contributions is sent with later ones, and nobody "
                "knows of how many: use a codec without a residual, such as Dense() or GRBS(4)",
            ),
            (
                promises.keeps_norm and not promises.variance,
                f"with {short_name(self.codec)} elements, and the noise in them, are not sent as they are: use "
                "Dense(), Cast() or GRBS(4)",
            ),
            (
                not isinstance(rule, ZenoPS) or rule.rho > 0,
                "what is shorter than the reference cannot be told from noise: use rho=0.6",
            ),
        )
        if why := next((text for is_met, text in lacking if not is_met), None):
            raise PlanError(
                f"Cannot use {short_name(rule)} with privacy={short_name(privacy)}: {why} - at `plan.validator`."
            )

    def _check_validator(self, rule: Rule) -> None:
        if isinstance(rule, type) or not isinstance(rule, Rule) or not rule.needs_validator:
            raise PlanError(
                f"Cannot judge by {short_name(rule)} beside a validator: use one of "
                f"{', '.join(sorted(_KINDS['validator']))}, made with (...), or None; for rules without a reference "
                "there is rule= - at `plan.validator`."
            )
        policy = self.sync.policy or BSP() if isinstance(self.sync, LocalSGD) else self.sync
        waits, promises = isinstance(policy, BSP), self.codec.promises
        lacking = (
            (
                self.rule is None,
                f"contributions are already combined by {short_name(self.rule)}: use one of them, and None for the "
                "other",
            ),
            (
                isinstance(self.fabric, Served) and not self.fabric.collocated,
                f"on {short_name(self.fabric)} no server that workers have no hold on sees contributions: use "
                "fabric=ParameterServer()",
            ),
            (
                waits or not rule.needs_losses or isinstance(policy, KSync),
                f"it keeps the best contributions of an update, and with {short_name(self.sync)} each is of one "
                "worker: use ZenoPlusPlus() and ASP(), or BSP(), KSync(k) or LocalSGD(...)",
            ),
            (
                not rule.needs_losses or not isinstance(policy, KSync) or policy.late == "drop",
                f"with {short_name(self.sync)} a validator that is late waits for the next update, and nobody judges "
                "that: use KSync(k, late='drop')",
            ),
            (
                waits or rule.needs_losses or isinstance(policy, ASP),
                f"with {short_name(self.sync)} it is not said which reference belongs to which update: use BSP(), "
                "LocalSGD(...) or ASP()",
            ),
            (
                waits or not isinstance(rule, ZenoPS),
                f"it is for updates of several workers, and with {short_name(self.sync)} each is of one: use "
                "ZenoPSAsync(), ZenoPlusPlus() or FLTrust(), or BSP()",
            ),
            (
                not waits or not isinstance(rule, ZenoPSAsync),
                f"it adds up single updates, and with {short_name(self.sync)} they are of all workers: use ZenoPS(), "
                "or ASP()",
            ),
            (
                promises.support != "private" or not rule.needs_reference,
                f"with {short_name(self.codec)} a contribution and its reference are of different elements: use a "
                "codec whose elements are the same on all workers, such as GRBS(32)",
            ),
            (
                promises.keeps_norm or not rule.judges_norms,
                f"with {short_name(self.codec)} all contributions are equally long, whatever they were made of: use "
                "GRBS(32) or QSGD(8), or FLTrust(), which goes by the angle alone",
            ),
            (
                self.tuning is None,
                f"with {short_name(self.tuning)} workers' batches differ from the validator's, and honest ones would "
                "be rejected: use tuning=None",
            ),
        )
        if why := next((text for is_met, text in lacking if not is_met), None):
            raise PlanError(f"Cannot judge by {short_name(rule)}: {why} - at `plan.validator`.")
        if isinstance(policy, KSync) and (why := rule.check(policy.k)):
            raise PlanError(f"Cannot judge with {short_name(self.sync)}: {why} - at `plan.validator`.")

    def _check_rule(self, rule: Rule) -> None:
        if isinstance(rule, type) or not isinstance(rule, Rule):
            raise PlanError(
                f"Cannot combine by {short_name(rule)}: use one of {', '.join(sorted(_KINDS['rule']))}, made with "
                "(...), or None - at `plan.rule`."
            )
        lacking = (
            (
                self.is_served,
                f"on {short_name(self.fabric)} contributions are added on their way, and nobody sees one by itself: "
                "use fabric=ParameterServer()",
            ),
            (
                not rule.needs_validator,
                f"it compares {'losses' if rule.needs_losses else 'contributions with a reference'} on trusted data, "
                "which only a validator can bring: give it as validator=, or use Median(), MultiKrum(...) or "
                "GeometricMedian(), which compare them with each other",
            ),
            (
                self._most_in_update(2) > 1,
                f"with {short_name(self.sync)} an update is of one worker, and there is nobody to compare it with: "
                "use BSP(), KSync(k) or LocalSGD(...)",
            ),
            (
                not rule.compares or self.codec.promises.support != "private",
                f"with {short_name(self.codec)} each worker sends other elements, and what is compared is which: use "
                "a codec whose elements are the same on all workers, such as GRBS(32), or Mean()",
            ),
            (
                self.tuning is None or rule.is_weighted,
                f"it counts all workers alike, and with {short_name(self.tuning)} their batches are not: use "
                "tuning=None",
            ),
        )
        if why := next((text for is_met, text in lacking if not is_met), None):
            raise PlanError(f"Cannot combine by {short_name(rule)}: {why} - at `plan.rule`.")

    def _most_in_update(self, world: int) -> int:
        """The contributions that make an update, of so many workers."""
        if isinstance(self.sync, KSync):
            return min(self.sync.k, world)
        return world if self.sync.replicated else 1

    def _check_codec(self) -> None:
        promises = self.codec.promises
        if promises.offset:
            self._check_offset(promises)
        if self.is_served:
            self._check_pushed(promises)
        if self.fabric.offers.elastic and promises.keeps_shared_state:
            raise PlanError(
                f"Cannot use {short_name(self.codec)} on {short_name(self.fabric)}: all workers go on from what each "
                "exchange left, and one that joins later has none of it. Use ProcessGroup(), or a codec that keeps "
                "nothing in common, such as ErrorFeedback(GRBS(32)) - at `plan.codec`."
            )

    def _check_pushed(self, promises: Promises) -> None:
        """See that a server can decode what a worker pushes, by itself."""
        why = ""
        if promises.rounds > 1:
            why = f"it sends {promises.rounds} rounds, and a push is one"
        elif not promises.is_additive:
            why = "it takes the parts of all workers at once, and a server decodes them one by one"
        elif not isinstance(innermost(self.codec), OneRoundCodec):
            why = "a server cannot decode it: it has no encode() and decode() of its own (`OneRoundCodec`)"
        if why:
            raise PlanError(
                f"Cannot use {short_name(self.codec)} on {short_name(self.fabric)}: {why}. Use a codec of one round, "
                "such as GRBS(32), TopK(0.01) or QSGD(8), or ProcessGroup() - at `plan.codec`."
            )

    def _check_offset(self, promises: Promises) -> None:
        """See that what is not sent of a worker's own steps can stay in its parameters."""
        codec, holds = self.codec, self.fabric.offers.holds
        if holds == "switch":
            raise PlanError(
                f"Cannot use {short_name(codec)} on {short_name(self.fabric)}: what is not sent is kept in each "
                "worker's own parameters, and this fabric's switch has others for all. Use ProcessGroup() or "
                "Elastic(), or ErrorFeedback(...) - at `plan.codec`."
            )
        if holds == "workers" and not isinstance(codec, ErrorReset):
            raise PlanError(
                f"Cannot use {short_name(codec)} on {short_name(self.fabric)}: it is for workers of a server, which "
                "may go on at their own pace. Use fabric=ParameterServer(), or "
                f"ErrorReset({short_name(innermost(codec))}) - at `plan.codec`."
            )
        if holds == "server" and not isinstance(self.sync, StepsLocally):
            raise PlanError(
                f"Cannot use {short_name(codec)} with {short_name(self.sync)} on {short_name(self.fabric)}: what is "
                "not sent of a worker's own steps stays in its parameters, and here the server's optimizer steps. "
                "Use sync=LocalSGD(8), or LocalSGD(8, policy=ASP()) to wait for nobody, or ErrorFeedback(...) - at "
                "`plan.codec`."
            )
        if isinstance(codec, ErrorReset):
            self._check_reset(codec)
        if holds == "server" and isinstance(codec, ErrorReset) and not self.sync.replicated:
            raise PlanError(
                f"Cannot use {short_name(codec)} with {short_name(self.sync)}: a reset is of what all workers have at "
                "one version, and with this policy they have different ones. Use "
                f"LookAhead({short_name(codec.reset)}) or Carry({short_name(codec.reset)}) - at `plan.codec`."
            )

    def _check_reset(self, codec: ErrorReset) -> None:
        policy = self.sync
        if isinstance(policy, StepsLocally):
            if codec.every is not None:
                raise PlanError(
                    f"Cannot use {short_name(codec)} with {short_name(policy)}: both say how often is averaged. Leave "
                    "out every= and step= of the one, or use BSP() - at `plan.codec.every`."
                )
            if policy.loss_class == "delayed" or policy.outer is not None:
                raise PlanError(
                    f"Cannot use {short_name(codec)} with {short_name(policy)}: what is not sent is kept in each "
                    "worker's own parameters, and so is what a delay, fragments or an outer optimizer leaves there. "
                    f"Use LocalSGD({policy.interval * policy.fragments}) - at `plan.sync`."
                )
        elif policy != BSP():
            raise PlanError(
                f"Cannot use {short_name(codec)} with {short_name(policy)}: all workers are to have a consensus in "
                "common behind each step. Use BSP() or LocalSGD(...) - at `plan.sync`."
            )
        elif codec.every is None:
            raise PlanError(
                f"Cannot use {short_name(codec)} with {short_name(policy)}: nothing says how often the error is "
                "reset. Use every=8, or sync=LocalSGD(8) - at `plan.codec.every`."
            )
        if self.scheduling is not None:
            raise PlanError(
                f"Cannot schedule with {short_name(self.scheduling)}: with {short_name(codec)} workers exchange what "
                "their optimizers have changed, and no gradients. Use None - at `plan.scheduling`."
            )

    def _check_delayed(self, policy: StepsLocally) -> None:
        if self.fabric.offers.holds != "workers":
            raise PlanError(
                f"Cannot use {short_name(policy)} on {short_name(self.fabric)}: an average that is applied later, or "
                "of a part of the model, is kept by the workers themselves, and this fabric's "
                f"{self.fabric.offers.holds} takes whole changes that are waited for. Use ProcessGroup() or "
                "Elastic(), or neither a delay nor fragments - at "
                f"`plan.sync.{'delay' if policy.delay else 'fragments'}`."
            )

    def _check_table(self) -> None:
        self._refuse_cap("a table adds up changes without end, and no gradients")
        self._refuse(
            codec=(None if self.codec == Dense() else self.codec, "the table adds whole changes: use Dense()"),
            tuning=(self.tuning, "each worker has a part of the data of its own: use None, or ParameterServer()"),
        )

    def _check_quorum(self) -> None:
        self._refuse_cap("what workers say beside gradients, such as how many samples, goes through the switch as well")
        self._refuse(
            tuning=(
                self.tuning,
                "its workers tell each other their times, all of them: use None, or ParameterServer()",
            ),
        )

    def _refuse_cap(self, why: str) -> None:
        if isinstance(self.fabric, Switch) and self.fabric.cap is not None:
            raise PlanError(
                f"Cannot clamp gradients to {self.fabric.cap:g} with {short_name(self.sync)}: {why}. Use BSP() or "
                "LocalSGD(...), or cap=None - at `plan.fabric.cap`."
            )

    def _refuse(self, **parts: tuple[object, str]) -> None:
        for name, (part, why) in parts.items():
            if part is not None:
                raise PlanError(
                    f"Cannot use {short_name(part)} with {short_name(self.sync)} on {short_name(self.fabric)}: {why} - "
                    f"at `plan.{name}`."
                )

    def _check_scheduling(self, scheduling: Scheduler) -> None:
        if isinstance(scheduling, type) or not hasattr(scheduling, "schedule"):
            raise PlanError(
                f"Cannot schedule with {short_name(scheduling)}: use one of "
                f"{', '.join(sorted(_KINDS['scheduling']))}, made with (), or None - at `plan.scheduling`."
            )
        lacking = (
            (
                not self.is_served or not (self.steps_locally or (self.sync.gated and not self._grants_early)),
                f"with {short_name(self.sync)} a worker has nothing to push, or may not, before its optimizer steps: "
                "use BSP(), ASP(), SSP(...), DSSP(...) or RoundRobin()",
            ),
            (
                self.is_served or self.sync == BSP(),
                "only where the gradients of every step are of all can a step be hidden: use BSP()",
            ),
            (
                not self.is_served or not isinstance(self.codec, ErrorFeedback),
                "a block that is pushed before the others has no residual: use Dense() or Cast()",
            ),
            (
                self.fabric.offers.reduce_scatter or not getattr(scheduling, "needs_reduce_scatter", False),
                f"{short_name(self.fabric)} cannot reduce and gather apart: use ProcessGroup() or Elastic(), or "
                "Prophet()",
            ),
        )
        if why := next((text for is_met, text in lacking if not is_met), None):
            raise PlanError(f"Cannot schedule with {short_name(scheduling)}: {why} - at `plan.scheduling`.")

    def _check_controller(self, controller: Controller) -> None:
        if isinstance(controller, type) or not hasattr(controller, "policies"):
            raise PlanError(
                f"Cannot use {short_name(controller)} as a controller: use WaitThreshold(), ByProgress(...), "
                "AdaptQuorum(...), or None - at `plan.controller`."
            )
        alone = (
            []
            if self.fabric.offers.holds != "workers"
            else [policy for policy in controller.policies if not policy.replicated]
        )
        if alone:
            raise PlanError(
                f"Cannot use {short_name(controller)} on {short_name(self.fabric)}: with {short_name(alone[0])}, "
                "which it may choose, each worker proceeds at its own pace, and there is no server. Use "
                "fabric=ParameterServer(), or only policies that need none, such as BSP() and LocalSGD(8) - at "
                "`plan.controller`."
            )
        if self.sync not in controller.policies:
            others = " or ".join(map(repr, controller.policies))
            raise PlanError(
                f"Cannot use {short_name(controller)} with {short_name(self.sync)}: it would never swap, since it "
                f"knows {others} only. Begin with sync={short_name(controller.policies[0])} - at `plan.controller`."
            )
        for policy in controller.policies:
            try:
                dataclasses.replace(self, sync=policy, controller=None)
            except PlanError as error:
                raise PlanError(
                    f"Cannot use {short_name(controller)}: {error}".replace("`plan.sync", "`plan.controller")
                ) from error

    def check_world(self, world: int) -> None:
        """Check that the plan works with so many workers.

        One that is alone may try any plan but one with a rule, which would leave out every update.

        Raises:
            PlanError: if more workers are to contribute to an update, or to be in a group, than there are; or more
                contributions are to be compared than can be.
        """
        if self.rule is not None and (why := self.rule.check(self._most_in_update(world))):
            raise PlanError(f"Cannot combine: {why} - at `plan.rule`.")
        beside = self.validator if world > 1 else None  # a validator is alone when it comes
        if beside is not None and (why := beside.check(self._most_in_update(world))):
            raise PlanError(f"Cannot judge: {why} - at `plan.validator`.")
        rule, count = self.judging_rule, self._most_in_update(world)
        if rule is not None and rule.needs_gram and count > MOST_COMPARED:
            raise PlanError(
                f"Cannot compare {count} contributions by {short_name(rule)}: {MOST_COMPARED} is the most. Use "
                f"{'Median(), which looks at each coordinate, or KSync(...)' if self.rule else 'ASP()'} - at "
                f"`plan.{'rule' if self.rule else 'validator'}`."
            )
        most = self.codec.promises.most_workers
        if most is not None and world > most:
            raise PlanError(
                f"Cannot use {short_name(self.codec)} with {world} workers: a sum of more than {most} does not fit. "
                "Use one with more bits, or Cast() - at `plan.codec.bits`."
            )
        if world > 1:
            check_workers(self.sync, [range(world)], "plan.sync")
            for policy in () if self.controller is None else self.controller.policies:
                check_workers(policy, [range(world)], "plan.controller")

    def swapped(self, part: str, *, whole: bool = False) -> Plan:
        """Make this plan with another part, such as ``[sync]``, as it may come to hold while a job trains.

        A controller that is not named in the part lets go when a person swaps the policy: it would swap back.

        Args:
            part: of a plan, as TOML; what is in it replaces what is here.
            whole: it is a whole plan; what is not in it has its default.

        Raises:
            PlanError: if it cannot be read, makes no plan that can work, or changes what cannot be while training.
        """
        fields = _fields_of(part)
        if whole:
            new = Plan(**fields)
        else:
            if fields.get("sync", self.sync) != self.sync:
                fields.setdefault("controller", None)
            new = Plan.from_toml(self.to_toml(), **fields)
        self._check_swap(new)
        return new

    def controlled(self, sync: Policy) -> Plan:
        """Make this plan with another of its controller's policies."""
        new = dataclasses.replace(self, sync=sync)
        self._check_swap(new)
        return new

    def _check_swap(self, new: Plan) -> None:
        here, there = own_steps(self.sync), own_steps(new.sync)
        if self.judging_rule is not None and here != there:
            # Whoever has not heard of the swap brings what the earlier policy wants, beside what the new one does.
            kinds = f"changes of {here} and of {there} steps" if here and there else "gradients and changes"
            raise PlanError(
                f"Cannot swap {short_name(self.sync)} for {short_name(new.sync)} while "
                f"{short_name(self.judging_rule)} compares contributions: until all have heard of it there are "
                f"{kinds}, which cannot be compared with each other. Save a checkpoint, and start again with the "
                "other plan - at `plan.sync`."
            )
        for name, (here, there) in self.diff(new).items():
            if name == "fabric" and self.is_served != new.is_served:
                self._check_crossing(here, there)
            elif name not in ("sync", "controller"):
                raise PlanError(
                    f"Cannot swap {short_name(here)} for {short_name(there)} while training: only the synchronization "
                    "policy can be, its controller, and ProcessGroup() or Elastic() for ParameterServer() or back. "
                    f"Save a checkpoint, and start again with the other plan - at `plan.{name}`."
                )

    def _check_crossing(self, here: FabricSpec, there: FabricSpec) -> None:
        if self.codec.promises.offset:
            raise PlanError(
                f"Cannot swap {short_name(here)} for {short_name(there)} with {short_name(self.codec)}: what it has "
                "not sent is in the workers' own parameters, which are not those that would be taken along. Save a "
                "checkpoint, and start again - at `plan.fabric`."
            )
        if self.tuning is not None:
            raise PlanError(
                f"Cannot swap {short_name(here)} for {short_name(there)} while batches follow the machines: what "
                f"{short_name(self.tuning)} has learnt holds for one of them. Save a checkpoint, and start again - at "
                "`plan.fabric`."
            )

    def refined(self, parts: str) -> Plan:
        """Make this plan with other fields, which are given as TOML, before anybody trains by it.

        Raises:
            PlanError: if they cannot be read, or make no plan that can work.
        """
        return Plan.from_toml(self.to_toml(), **_fields_of(parts))

    @property
    def _grants_early(self) -> bool:
        """Whether a worker may begin to push in its turn although it still computes."""
        return isinstance(self.sync, RoundRobin)

    @property
    def _takes_single_turns(self) -> bool:
        """Whether only one worker at a time, or the workers of one group, may push, however many hosts have shards."""
        return isinstance(self.sync, TakesTurns) and self.sync.slots_over(hosts=2) == 1

    @property
    def caution(self) -> str:
        """Say what people should know before they train by it; "" if there is nothing."""
        variance = self.codec.promises.variance
        if variance is None or variance < _LARGE_VARIANCE:
            return ""
        return (
            f"{short_name(self.codec)} sends what is right on average, and up to {math.sqrt(variance):.2g} times the "
            "gradient's norm beside it, as noise that no residual makes up for. Use a codec that sends more, or "
            "ErrorFeedback(...) around one that is biased - at `plan.codec`."
        )

    @property
    def judging_rule(self) -> Rule | None:
        """The rule by which a server makes updates, beside a validator or without; None for their mean."""
        return self.rule or self.validator

    @property
    def pushed_codec(self) -> OneRoundCodec:
        """The codec by which a worker encodes each block that it pushes to a server."""
        codec = innermost(self.codec)
        assert isinstance(codec, OneRoundCodec), f"{short_name(codec)} is refused on a server"
        return codec

    @property
    def encodes_blocks(self) -> bool:
        """Whether it takes the codec to read what workers push to a server."""
        return self.is_served and not self.pushed_codec.is_plain

    @property
    def is_served(self) -> bool:
        """Whether parameters live at a server."""
        return self.fabric.offers.holds == "server"

    @property
    def is_tabled(self) -> bool:
        """Whether workers go on at their own pace, each by its own optimizer, and a switch sums their changes."""
        return self._is_switched and compile_policy(self.sync).path == "table"

    @property
    def has_quorum(self) -> bool:
        """Whether a switch makes updates of some workers' gradients, and tells the others that they came too late."""
        return self._is_switched and compile_policy(self.sync).quorum is not None

    @property
    def barrier_reason(self) -> str:
        """The reason why gradients are waited for behind backward though there is a scheduler; "" if there is none.

        >>> from offbeat.scheduling import Prophet
        >>> Plan(scheduling=Prophet(), nonfinite="skip").barrier_reason
        "with nonfinite='skip' no parameter is stepped before it is known that the mean of all is finite"
        """
        if self.scheduling is None or self.is_served:
            return ""
        if self.nonfinite != "pass":
            return (
                f"with nonfinite={self.nonfinite!r} no parameter is stepped before it is known that the mean of all is "
                "finite"
            )
        if isinstance(self.codec, ErrorFeedback):
            return "a gradient that is cut has no residual, which ErrorFeedback(...) adds to the next one"
        if not self.codec.promises.linear:
            return f"what {short_name(self.codec)} sends is not added on its way, in one round"
        return ""

    @property
    def _is_switched(self) -> bool:
        """Whether a switch decides who may go on, or whose gradients are in an update."""
        return self.fabric.offers.holds == "switch" and not self.sync.replicated

    @property
    def working_codec(self) -> Codec:
        """The codec by which gradients go: what comes too late for an update is kept if the policy says so.

        Where what is not sent stays in a worker's own parameters it is what optimizers have changed that is sent in
        part; gradients, of the first steps of `LocalSGD(after=...)`, are sent as they are.
        """
        if self.codec.promises.offset:
            return Dense()
        if self.has_quorum and compile_policy(self.sync).keeps_late and not isinstance(self.codec, ErrorFeedback):
            return ErrorFeedback(self.codec)
        return self.codec

    @property
    def local_policy(self) -> StepsLocally | None:
        """The policy by which workers average how far their own optimizers came; None if these step with the mean.

        >>> from offbeat.codec import ErrorReset, GRBS
        >>> plans = Plan(codec=ErrorReset(every=8)), Plan(codec=ErrorReset(step=GRBS(64), every=8))
        >>> [plan.local_policy.interval for plan in plans]
        [8, 1]
        """
        return self.sync if isinstance(self.sync, StepsLocally) else self._reset_policy

    @property
    def _reset_policy(self) -> LocalSGD | None:
        """The cadence of a codec that has one of its own."""
        if isinstance(self.sync, StepsLocally) or not isinstance(self.codec, ErrorReset):
            return None
        return LocalSGD(1 if self.codec.step is not None else self.codec.every or 1)

    @property
    def steps_locally(self) -> bool:
        """Whether each worker's own optimizer steps on its own gradient, and changes are exchanged."""
        return self.is_tabled or self.local_policy is not None

    @property
    def replicas_differ(self) -> bool:
        """Whether no two workers ever have the same parameters but behind `Run.settle`; they have an anchor then."""
        policy = self.local_policy
        return policy is not None and (policy.loss_class == "delayed" or bool(self.codec.promises.offset))

    def contributes(self, step: int) -> Contributes:
        """The kind of contribution that a worker makes behind a step; None for none."""
        if self.is_tabled:
            return "change"
        return self.cadence.contributes(step)

    @property
    def cadence(self) -> Policy:
        """The policy by which steps and contributions are counted: that of the plan, or of a codec that resets."""
        return self._reset_policy or self.sync

    def step_of(self, number: int) -> int:
        """The step behind which contribution `number` is made."""
        return number if self.local_policy is None else self.local_policy.step_of(number)

    @property
    def has_elastic_group(self) -> bool:
        """Whether there is no server, and the others go on without a worker that is lost."""
        return self.fabric.offers.elastic and not self.is_served

    def check_newcomers(self) -> None:
        """See that workers can join a job without a server that trains by this plan.

        Raises:
            PlanError: if they cannot.
        """
        if not self.has_elastic_group:
            raise PlanError(
                f"Cannot join a job without a server with {short_name(self.fabric)}: its workers have Elastic(). Give "
                "this one their plan (`offbeat run --plan`) - at `plan.fabric`."
            )
        if self.fabric.offers.holds == "switch":
            raise PlanError(
                f"Cannot join a job that trains on {short_name(self.fabric)}: the switch learns at the beginning how "
                "many workers there are. Start the job again with more workers, or use Elastic() - at `plan.fabric`."
            )

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the TOML form: plans have equal digests if and only if they are equal."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()

    def diff(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """The fields in which `other` differs: name -> (here, there).

        >>> from offbeat.codec import Cast
        >>> Plan().diff(Plan(codec=Cast("bf16")))
        {'codec': (Dense(), Cast(dtype='bf16'))}
        """
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        return {name: (here, there) for name, here, there in pairs if here != there}

    def to_toml(self) -> str:
        """The plan as TOML; `from_toml` reads it back."""
        return _dumps({name: value for name, value in table_of(self).items() if name != "kind"})

    @classmethod
    def from_toml(cls, text: str, **instead: Any) -> Plan:
        """Read a plan; what is left out has its default.

        Args:
            instead: fields to take instead of what the text says.

        Raises:
            PlanError: if the text is not TOML, or a key or value is unknown; the text ends with the path.
        """
        return cls(**{**_fields_of(text, instead), **instead})


def toml_of(fields: Mapping[str, Any]) -> str:
    """Write fields of a plan, by name, as TOML.

    >>> print(toml_of({"keeps": "global_batch"}), end="")
    keeps = "global_batch"
    """
    hints = typing.get_type_hints(Plan)
    return _dumps({name: _to_table(value, hints[name]) for name, value in fields.items() if value is not None})


def _dumps(table: Mapping[str, Any]) -> str:
    scalars = {name: value for name, value in table.items() if not isinstance(value, dict)}
    return tomli_w.dumps({**scalars, **table})


def _fields_of(text: str, known: Collection[str] = ()) -> dict[str, Any]:
    """Read the fields of a plan, or of a part of one, from TOML, but for those that are known otherwise.

    Raises:
        PlanError: if the text is not TOML, or a key or value is unknown.
    """
    table = toml_reader.decode(text, "plan", PlanError)
    fields = {f.name for f in dataclasses.fields(Plan)}
    values = {}
    for key, value in table.items():
        if key in known:
            continue
        if key not in fields:
            raise PlanError(f"Unknown key {key!r}{_nearest(key, fields)} - at `plan.{key}`.")
        values[key] = _value(value, Plan, key, "plan", "plan")
    return values


def part_of(room: str, table: Any) -> Any:
    """The part that a table of TOML describes.

    Args:
        room: a field of the plan that holds a part, such as "sync".
        table: its kind and its values.

    Raises:
        PlanError: if there is no such part, or a value cannot be; the text ends with the path.
    """
    toml_reader.check_values(table, "plan", f"plan.{room}", PlanError)
    return _part(table, room, _KINDS[room], f"plan.{room}", f"plan.{room}")


def names_of_fields(kind: str) -> tuple[str, ...] | None:
    """List the fields of a part, in order; None if there is no such part.

    >>> names_of_fields("DSSP")
    ('low', 'high')
    """
    known = {name: cls for kinds in _KINDS.values() for name, cls in kinds.items()}
    return tuple(field.name for field in dataclasses.fields(known[kind])) if kind in known else None


def _kinds(kinds: frozenset[type]) -> str:
    return " and ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"


def table_of(part: Any) -> dict[str, Any]:
    """A part as a table of TOML; `part_of` reads it back.

    >>> from offbeat.sync import SSP
    >>> table_of(SSP(4))
    {'kind': 'SSP', 'bound': 4}
    """
    table: dict[str, Any] = _to_table(part)
    return table


def _told_fields(value: Any) -> list[dataclasses.Field[Any]]:
    """List the fields that are written down."""
    fields = dataclasses.fields(value)
    return [f for f in fields if f.name not in _CAME_LATER or getattr(value, f.name) != f.default]


def _to_table(value: Any, hint: Any = None) -> Any:
    """Write down a value of a field with this type hint: equal values in one form, which is the one that is read."""
    if isinstance(value, tuple):
        return [_to_table(one, next(iter(typing.get_args(hint)), None)) for one in value]
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        hints = _hints(kind)
        fields = {f.name: _to_table(getattr(value, f.name), hints.get(f.name)) for f in _told_fields(value)}
        return {"kind": type(value).__name__, **{name: field for name, field in fields.items() if field is not None}}
    if type(value) is int and float in (hint, *typing.get_args(hint)):
        value = float(value)
    return value + 0.0 if type(value) is float else value  # 0.0 and -0.0 are equal


@functools.lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    """The type hints of a part's fields; none of a class whose hints have names that its module lacks."""
    try:
        return typing.get_type_hints(kind)
    except NameError:
        return {}


def _part(table: Any, name: str, kinds: dict[str, Any], path: str, told: str) -> Any:
    """Make a part from its table.

    Args:
        kinds: what it may be.
        path: where it is.
        told: where a part of this kind believes itself to be, when it complains.
    """
    if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
        raise PlanError(
            f"Cannot read {brief(repr(table))} as {name}: write a table with its kind, such as "
            f'kind = "{next(iter(kinds))}" - at `{path}`.'
        )
    kind = table["kind"]
    if kind not in kinds:
        raise PlanError(f"Unknown {name} {brief(repr(kind))}{_nearest(kind, kinds)} - at `{path}.kind`.")
    cls = kinds[kind]
    fields = {f.name: f for f in dataclasses.fields(cls)}
    arguments = {}
    for key, value in table.items():
        if key == "kind":
            continue
        if key not in fields:
            raise PlanError(f"Unknown key {key!r} of {kind}{_nearest(key, fields)} - at `{path}.{key}`.")
        arguments[key] = _value(value, cls, key, path, told)
    for key, field_ in fields.items():
        optional = field_.default is not dataclasses.MISSING or field_.default_factory is not dataclasses.MISSING
        if key not in arguments and not optional:
            raise PlanError(f"Cannot make {kind} without {key}: it has no default - at `{path}.{key}`.")
    try:
        return cls(**arguments)
    except PlanError as error:
        raise PlanError(str(error).replace(f"`{told}.", f"`{path}.")) from error


def _value(value: Any, cls: type, key: str, path: str, told: str) -> Any:
    """Read the value of a field; `path` and `told` are those of the part it belongs to."""
    hint = _hints(cls)[key]
    if typing.get_origin(hint) is tuple and (room := _ROOMS.get(typing.get_args(hint)[0])) and isinstance(value, list):
        parts = enumerate(value)
        return tuple(_part(one, key, _KINDS[room], f"{path}.{key}[{i}]", f"plan.{room}") for i, one in parts)
    for one in (hint, *typing.get_args(hint)):
        if one in _ROOMS:
            room = key if key in _KINDS else _ROOMS[one]
            return _part(value, key, _KINDS[room], f"{path}.{key}", f"plan.{room}")
        if isinstance(one, type) and dataclasses.is_dataclass(one):
            return _part(value, key, {one.__name__: one}, f"{path}.{key}", f"{told}.{key}")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        allowed = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        advice = f"Choose one of {', '.join(map(repr, allowed))}" if allowed else str(error)
        raise PlanError(f"Cannot use {brief(repr(value))} as {key}. {advice} - at `{path}.{key}`.") from error


def _nearest(word: str, known: typing.Iterable[str]) -> str:
    """Suggest known words for an unknown one: `` (did you mean 'x' or 'y'?)`` or the list of what there is."""
    names = sorted(known)
    alike = {name.lower(): name for name in names}
    if close := difflib.get_close_matches(word.lower(), alike, n=2, cutoff=0.5):
        return f" (did you mean {' or '.join(repr(alike[name]) for name in close)}?)"
    return f" (there is {', '.join(names)})" if names else " (it takes no keys)"


_ROOMS: dict[Any, str] = {
    Policy: "sync",
    Codec: "codec",
    CollectiveMethod: "collective",
    FabricSpec: "fabric",
    Controller: "controller",
    Scheduler: "scheduling",
    Rule: "rule",
}
_KINDS: dict[str, dict[str, Any]] = {
    "sync": {
        "ASP": ASP,
        "BSP": BSP,
        "DSSP": DSSP,
        "Hybrid": Hybrid,
        "KSync": KSync,
        "LocalSGD": LocalSGD,
        "RoundRobin": RoundRobin,
        "SSP": SSP,
    },
    "collective": {
        "BidirectionalRing": BidirectionalRing,
        "DoubleBinaryTree": DoubleBinaryTree,
        "FlatTree": FlatTree,
        "Greedy": Greedy,
        "HDRM": HDRM,
        "HalvingDoubling": HalvingDoubling,
        "MultiTree": MultiTree,
        "PipelinedTrees": PipelinedTrees,
        "RecursiveDoubling": RecursiveDoubling,
        "Ring": Ring,
        "Ring2D": Ring2D,
        "WaterFilling": WaterFilling,
    },
    "codec": {
        "Carry": Carry,
        "Cast": Cast,
        "Dense": Dense,
        "ErrorFeedback": ErrorFeedback,
        "ErrorReset": ErrorReset,
        "FixedPoint": FixedPoint,
        "GRBS": GRBS,
        "LookAhead": LookAhead,
        "PowerSGD": PowerSGD,
        "QSGD": QSGD,
        "RandomK": RandomK,
        "Sign": Sign,
        "TopK": TopK,
    },
    "controller": {"AdaptQuorum": AdaptQuorum, "ByProgress": ByProgress, "WaitThreshold": WaitThreshold},
    "fabric": {
        "Elastic": Elastic,
        "InMemory": InMemory,
        "ObjectStore": ObjectStore,
        "ParameterServer": ParameterServer,
        "ProcessGroup": ProcessGroup,
        "Routed": Routed,
        "Switch": Switch,
    },
    "rule": {
        "Bulyan": Bulyan,
        "CentredClipping": CentredClipping,
        "ClippedMean": ClippedMean,
        "FABA": FABA,
        "FLTrust": FLTrust,
        "GeometricMedian": GeometricMedian,
        "Krum": Krum,
        "MeaMed": MeaMed,
        "Mean": Mean,
        "Median": Median,
        "MultiKrum": MultiKrum,
        "Phocas": Phocas,
        "TrimmedMean": TrimmedMean,
    },
    "privacy": {"GaussianMechanism": GaussianMechanism},
    "tuning": {"BatchTuning": BatchTuning},
    "scheduling": {
        "Credit": Credit,
        "FIFO": FIFO,
        "MergedGradient": MergedGradient,
        "Priority": Priority,
        "Prophet": Prophet,
        "ReduceScatterGather": ReduceScatterGather,
    },
    "validator": {
        "FLTrust": FLTrust,
        "ZenoPS": ZenoPS,
        "ZenoPSAsync": ZenoPSAsync,
        "Zeno": Zeno,
        "ZenoPlusPlus": ZenoPlusPlus,
    },
}
