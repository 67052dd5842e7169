"""Plans: checked when made, TOML in and out, clear about what is wrong."""

from __future__ import annotations

import pytest

from offbeat import BSP, Cast, Dense, InMemory, Plan, ProcessGroup
from offbeat.errors import PlanError

PLANS = [Plan(), Plan(codec=Cast("fp16")), Plan(fabric=InMemory(), bucket_bytes=1000, nonfinite="skip")]


@pytest.mark.parametrize("plan", PLANS)
def test_toml_and_repr_bring_it_back(plan: Plan) -> None:
    assert Plan.from_toml(plan.to_toml()) == plan
    names = {"Plan": Plan, "BSP": BSP, "Cast": Cast, "Dense": Dense, "InMemory": InMemory, "ProcessGroup": ProcessGroup}
    assert eval(repr(plan), names) == plan


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
        ("nonfinite = 'ignore'", "at `plan.nonfinite`"),
        ("[codec", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_with_the_path(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text)
    assert message in str(caught.value)


def test_parts_in_the_wrong_place_are_refused() -> None:
    with pytest.raises(PlanError, match=r"Cannot use Dense\(\) as sync.*at `plan.sync`"):
        Plan(sync=Dense())  # type: ignore[arg-type]


def test_diff_names_what_changed() -> None:
    assert Plan().diff(Plan(codec=Cast("bf16"), bucket_bytes=7)) == {
        "codec": (Dense(), Cast("bf16")),
        "bucket_bytes": (25 << 20, 7),
    }
    assert Plan().diff(Plan()) == {}
