"""Plans: checked when made, TOML in and out, clear about what is wrong."""

from __future__ import annotations

import pytest

import offbeat.fabric
import offbeat.sync
from offbeat import (
    ASP,
    BSP,
    DSSP,
    SSP,
    Cast,
    Dense,
    Hybrid,
    InMemory,
    KSync,
    LocalSGD,
    Plan,
    RoundRobin,
)
from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer, ProcessGroup
from offbeat.short_name import short_name
from offbeat.sync import OuterSGD, Policy

SERVED: list[Policy] = [
    ASP(),
    SSP(bound=4),
    DSSP(low=1, high=3),
    KSync(k=3, late="carry"),
    RoundRobin(strict=True, grace=float("inf")),
    Hybrid(KSync(k=1), RoundRobin(), groups=((0, 1), (2,))),
    Hybrid(inner=Hybrid(BSP(), SSP(bound=1), groups=2), outer=BSP(), groups=4),
]
PLANS = [
    Plan(),
    Plan(codec=Cast("fp16")),
    Plan(fabric=InMemory(), bucket_bytes=1000, nonfinite="skip"),
    Plan(sync=LocalSGD(every=8)),
    Plan(sync=LocalSGD(every=8, delay=1, fragments=4)),
    Plan(sync=LocalSGD(every=8, after=100, outer=OuterSGD(lr=1.0, momentum=0.0, nesterov=False))),
    *(Plan(sync=policy, fabric=ParameterServer()) for policy in SERVED),
    Plan(sync=LocalSGD(every=8, outer=OuterSGD()), fabric=ParameterServer()),
    Plan(sync=SSP(bound=4), fabric=ParameterServer(block_bytes=4096, collocated=True)),
]


@pytest.mark.parametrize("plan", PLANS)
def test_toml_and_repr_bring_it_back(plan: Plan) -> None:
    assert Plan.from_toml(plan.to_toml()) == plan
    names = {**vars(offbeat.sync), **vars(offbeat.fabric), "Plan": Plan, "Cast": Cast, "Dense": Dense}
    assert eval(repr(plan), names, {"inf": float("inf")}) == plan


def test_digest_tells_plans_apart() -> None:
    assert len({plan.digest for plan in PLANS}) == len(PLANS)
    assert Plan().digest == Plan.from_toml("").digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[codecs]\nkind = 'Dense'", "Unknown key 'codecs' (did you mean 'codec'?) - at `plan.codecs`"),
        ("[codec]\nkind = 'Cats'", "Unknown codec 'Cats' (did you mean 'Cast'?) - at `plan.codec.kind`"),
        ("[codec]\nkind = 'Cast'\ndtipe = 'bf16'", "(did you mean 'dtype'?) - at `plan.codec.dtipe`"),
        ("[codec]\nkind = 'Cast'\ndtype = 'bf17'", "at `plan.codec.dtype`"),
        (
            "[codec]\nkind = 'Cast'\ndtype = 3",
            "Cannot use 3 as dtype. Choose one of 'bf16', 'fp16' - at `plan.codec.dtype`",
        ),
        ("codec = 'Dense'", "write a table with its kind"),
        ("bucket_bytes = 'many'", "Expected `int`, got `str` - at `plan.bucket_bytes`"),
        ("bucket_bytes = 0", "at `plan.bucket_bytes`"),
        ("[scheduling]\nkind = 'Priority'\nslice_bytes = 0", "at `plan.scheduling.slice_bytes`"),
        ("[scheduling]\nkind = 'Prophet'\nleast_bytes = 1.5", "at `plan.scheduling.least_bytes`"),
        ("nonfinite = 'ignore'", "at `plan.nonfinite`"),
        ("[codec", "not valid TOML"),
        ("[sync]\nkind = 'SPS'", "Unknown sync 'SPS' (did you mean 'SSP' or 'BSP'?) - at `plan.sync.kind`"),
        ("[sync]\nkind = 'SSP'", "Cannot make SSP without bound: it has no default - at `plan.sync.bound`"),
        ("[sync]\nkind = 'SSP'\nbound = -1", "at `plan.sync.bound`"),
        ("[sync]\nkind = 'KSync'\nk = 2\nlate = 'keep'", "Choose one of 'drop', 'carry' - at `plan.sync.late`"),
        ("[sync]\nkind = 'Hybrid'\ngroups = 2\ninner = 'BSP'", "with its kind, such as"),
        (
            "[sync]\nkind = 'Hybrid'\ngroups = 2\ninner = {kind = 'BPS'}",
            "(did you mean 'BSP'?) - at `plan.sync.inner.kind`",
        ),
        ("[sync]\nkind = 'Hybrid'\ngroups = 2\ninner = {kind = 'SSP', bound = -1}", "at `plan.sync.inner.bound`"),
        (
            "[sync]\nkind = 'Hybrid'\ngroups = 2\ninner = {kind = 'SSP', bund = 1}",
            "(did you mean 'bound'?) - at `plan.sync.inner.bund`",
        ),
        ("[sync]\nkind = 'Hybrid'\ngroups = 2\ninner = {kind = 'SSP', bound = 'x'}", "at `plan.sync.inner.bound`"),
        (
            "[sync]\nkind = 'Hybrid'\ngroups = [[0, 'a']]\ninner = {kind = 'BSP'}\nouter = {kind = 'BSP'}",
            "at `plan.sync.groups`",
        ),
        ("[sync]\nkind = 'LocalSGD'\nevery = 2\nouter = {kind = 'OuterSGD', lr = -1}", "at `plan.sync.outer.lr`"),
        (
            "[sync]\nkind = 'LocalSGD'\nevery = 2\nouter = {kind = 'OuterSDG'}",
            "(did you mean 'OuterSGD'?) - at `plan.sync.outer.kind`",
        ),
        (
            "[sync]\nkind = 'Hybrid'\ngroups = 2\n"
            "inner = {kind = 'LocalSGD', every = 2, outer = {kind = 'OuterSGD', momentum = 2}}",
            "at `plan.sync.inner.outer.momentum`",
        ),
    ],
)
def test_a_bad_file_is_refused_with_the_path(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text)
    assert message in str(caught.value)


def test_parts_in_the_wrong_place_are_refused() -> None:
    with pytest.raises(PlanError, match=r"Cannot use .*ASP.*made with \(\) - at `plan.sync`"):
        Plan(sync=offbeat.sync.ASP)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"Cannot use Dense\(\) as sync.*at `plan.sync`"):
        Plan(sync=Dense())  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", SERVED, ids=lambda policy: type(policy).__name__)
def test_a_policy_that_needs_a_server_is_refused_elsewhere(policy: Policy) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(sync=policy)
    assert str(caught.value).startswith(f"Cannot use {short_name(policy)} on ProcessGroup(): ")
    assert "Use fabric=ParameterServer()" in str(caught.value)
    assert str(caught.value).endswith("at `plan.sync`.")
    Plan(sync=policy, fabric=ParameterServer())


def test_turns_of_one_worker_on_collocated_shards_are_refused() -> None:
    beside = ParameterServer(collocated=True)
    for policy in (RoundRobin(slots=1), Hybrid(BSP(), RoundRobin(strict=True), groups=2)):
        with pytest.raises(PlanError, match=r"would be idle\. Use slots=.*at `plan\.sync\.slots`"):
            Plan(sync=policy, fabric=beside)
        Plan(sync=policy, fabric=ParameterServer())
    others: list[Policy] = [RoundRobin(), RoundRobin(slots=3), Hybrid(RoundRobin(), BSP(), groups=2), SSP(bound=1)]
    for other in others:
        Plan(sync=other, fabric=beside)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (KSync(k=5), "updates of 5 contributions with 4 workers: .* Choose from 1 to 4, .* at `plan.sync.k`"),
        (Hybrid(BSP(), BSP(), groups=5), "groups of 5 with 4 workers: .* at `plan.sync.groups`"),
        (Hybrid(BSP(), BSP(), groups=((0, 1), (2, 4))), "no 4 among them, counting from 0 - at `plan.sync.groups`"),
        (Hybrid(KSync(k=3), BSP(), groups=2), "with 2 workers in the largest group: .* at `plan.sync.inner.k`"),
        (Hybrid(BSP(), KSync(k=3), groups=2), "with 2 groups: .* at `plan.sync.outer.k`"),
        (Hybrid(Hybrid(BSP(), KSync(k=3), groups=1), BSP(), groups=2), "2 groups: .* at `plan.sync.inner.outer.k`"),
        (
            Hybrid(BSP(), Hybrid(BSP(), BSP(), groups=3), groups=2),
            "groups of 3 with 2 groups: .* `plan.sync.outer.groups`",
        ),
    ],
    ids=str,
)
def test_more_than_there_are_is_refused_once_the_world_is_known(policy: Policy, says: str) -> None:
    plan = Plan(sync=policy, fabric=ParameterServer())
    plan.check_world(1)
    with pytest.raises(PlanError, match=f"^Cannot .*{says}"):
        plan.check_world(4)


def test_as_many_as_there_are_will_do() -> None:
    for policy in (
        KSync(k=4),
        Hybrid(KSync(k=2), KSync(k=2), groups=2),
        Hybrid(KSync(k=3), BSP(), groups=((0, 1, 2),)),
        Hybrid(Hybrid(KSync(k=2), BSP(), groups=((0, 1), (3,))), BSP(), groups=((0, 1, 2), (3,))),
    ):
        Plan(sync=policy, fabric=ParameterServer()).check_world(4)


def test_collocated_shards_and_addresses_exclude_each_other() -> None:
    with pytest.raises(PlanError, match=r"one or the other.*at `plan\.fabric\.collocated`"):
        ParameterServer(("10.0.0.1:7070",), collocated=True)


def test_diff_names_what_changed() -> None:
    assert Plan().diff(Plan(codec=Cast("bf16"), bucket_bytes=7)) == {
        "codec": (Dense(), Cast("bf16")),
        "bucket_bytes": (25 << 20, 7),
    }
    assert Plan().diff(Plan()) == {}


def test_local_steps_of_groups_are_refused() -> None:
    for fabric in (ParameterServer(), ProcessGroup()):
        with pytest.raises(PlanError, match=r"on any fabric.*Use LocalSGD\(\.\.\.\) for all workers.*`plan.sync`"):
            Plan(sync=Hybrid(LocalSGD(every=2), RoundRobin(), groups=2), fabric=fabric)
