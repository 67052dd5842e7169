"""A liar's process: what it puts in the place of its contributions, how often, and from what it knows."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from offbeat import contribution_hooks
from offbeat.attack_spec import AttackSpec, read_forged
from offbeat.protocol.training import EncodedPayload
from offbeat.server.encoded_block import EncodedBlock
from offbeat.testing.attacker import Attacker, assert_forged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

D, SHARE = 300, 0.25
Contribution = list[torch.Tensor]


def spec(kind: str, **others: Any) -> AttackSpec:
    return msgspec.convert({"workers": [1], "kind": kind, **others}, AttackSpec)


def honest(step: int) -> Contribution:
    """Two buckets, of which the one is in 16 bits; another in each step, though not by much."""
    generator = torch.Generator().manual_seed(step)
    whole = 1 + 0.1 * torch.randn(D, generator=generator)
    return [whole[:100].clone(), whole[100:].bfloat16()]


def told(folder: Path, attack: AttackSpec, *, steps: int = 12, share: float = 1.0) -> list[torch.Tensor]:
    """What is encoded in each step, multiplied by its share."""
    sent = []
    with closing(Attacker([attack], folder / "lies", 1, world=10)):
        for step in range(steps):
            vectors = [vector * share for vector in honest(step)]
            contribution_hooks.before_encode(vectors, "model", step, share)
            sent.append(torch.cat([vector.float() for vector in vectors]) / share)
    return sent


def whole(step: int) -> torch.Tensor:
    return torch.cat([vector.float() for vector in honest(step)])


def sample(step: int) -> torch.Tensor:
    return torch.stack([whole(one) for one in range(max(0, step - 7), step + 1)])


LIES: dict[str, tuple[dict[str, Any], int, Callable[[int], torch.Tensor]]] = {
    "sign": ({}, 0, lambda step: -6 * whole(step)),
    "zero": ({}, 0, lambda step: torch.zeros(D)),
    "inflate": ({"scale": 30}, 0, lambda step: 30 * whole(step)),
    "replay": ({"age": 3}, 3, lambda step: whole(step - 3)),
    "repeat": ({}, 0, lambda step: whole(0)),
    "bit-flip": ({}, 0, lambda step: -sample(step)[0]),
    "mimic": ({}, 1, lambda step: sample(step)[0]),
    "ipm": ({"epsilon": 0.1}, 0, lambda step: -0.1 * sample(step).mean(0)),
    "alie": ({"z": 1.5}, 1, lambda step: sample(step).mean(0) - 1.5 * sample(step).std(0, correction=0)),
}


@pytest.mark.parametrize("kind", LIES)
def test_lies_are_of_the_whole_contribution_and_of_the_liars_own_ones(tmp_path: Path, kind: str) -> None:
    """What is said of gradients holds of those that were multiplied by a share, before they are added up."""
    settings, first, wanted = LIES[kind]
    sent = told(tmp_path, spec(kind, **settings), share=SHARE)
    for step in range(first):
        torch.testing.assert_close(sent[step], whole(step), rtol=1e-2, atol=1e-2)
    for step in range(first, 12):
        torch.testing.assert_close(sent[step], wanted(step), rtol=1e-2, atol=1e-2)
    assert [one.step for one in read_forged(tmp_path / "lies")] == list(range(first, 12))


def test_noise_is_as_strong_as_asked_and_drawn_again_alike(tmp_path: Path) -> None:
    loud, again = (told(tmp_path, spec("gaussian", std=20), share=SHARE) for _ in range(2))
    assert float(torch.stack(loud).std()) == pytest.approx(20, rel=0.1)
    assert torch.equal(torch.stack(loud), torch.stack(again))
    assert not torch.equal(loud[0], loud[1])
    assert not torch.equal(loud[0], told(tmp_path, spec("gaussian", std=20, seed=1))[0])
    far = told(tmp_path, spec("direction"))
    assert float(far[3].norm()) == pytest.approx(8 * float(whole(3).norm()), rel=1e-2)


@pytest.mark.parametrize("kind", ["nan", "inf", "min-max", "min-sum"])
def test_other_lies_are_told(tmp_path: Path, kind: str) -> None:
    sent = told(tmp_path, spec(kind))
    is_finite = bool(torch.isfinite(sent[5]).all())
    assert is_finite == kind.startswith("min")
    assert not torch.equal(sent[5], whole(5))


def test_a_liar_hides_among_the_workers_of_its_job(tmp_path: Path) -> None:
    """ALIE's formula at n = 10, f = 4, where no other is given."""
    attack = spec("alie", workers=[1, 2, 3, 4])
    step = 11
    wanted = sample(step).mean(0) - 0.4307 * sample(step).std(0, correction=0)
    torch.testing.assert_close(told(tmp_path, attack)[step], wanted, rtol=1e-2, atol=1e-2)


def test_a_rate_is_drawn_for_each_worker_and_step_and_for_all_buckets_alike(tmp_path: Path) -> None:
    attack = spec("zero", rate=0.3, from_step=10, workers=[0, 1])
    struck = []
    for rank in (0, 1):
        with closing(Attacker([attack], tmp_path / "lies", rank, world=2)):
            for step in range(400):
                one, other = torch.ones(3), torch.ones(4)
                contribution_hooks.before_encode([one], "first", step)
                contribution_hooks.before_encode([other], "second", step)
                assert bool(one.any()) == bool(other.any())
                struck += [(rank, step)] if not one.any() else []
    assert struck == [(one.worker, one.step) for one in read_forged(tmp_path / "lies")]
    for rank in (0, 1):
        steps = [step for worker, step in struck if worker == rank]
        assert 90 <= len(steps) <= 145
        assert min(steps) >= 10
    assert {step for rank, step in struck if rank} != {step for rank, step in struck if not rank}


def test_blocks_that_are_encoded_keep_their_form(tmp_path: Path) -> None:
    """Places and scales are not numbers of the gradient: of what is encoded the floats are forged."""
    places, values = torch.tensor([3, 9]), torch.tensor([1.0, -2.0])
    blocks = {0: torch.full((2,), 4.0, dtype=torch.float16), 1: EncodedBlock(EncodedPayload(0), (places, values))}
    with closing(Attacker([spec("sign", when="after")], tmp_path / "lies", 1, world=2)):
        sent = contribution_hooks.before_push(blocks, "model", 0)
    assert sent[0].tolist() == [-24.0, -24.0]
    assert sent[0].dtype == torch.float16
    assert sent[1].tensors[0] is places
    assert sent[1].tensors[1].tolist() == [-6.0, 12.0]
    assert values.tolist() == [1.0, -2.0], "which may be what a residual is made of"


def test_who_drops_pushes_nothing(tmp_path: Path) -> None:
    blocks = {0: torch.ones(2)}
    with closing(Attacker([spec("drop", from_step=1)], tmp_path / "lies", 1, world=2)):
        assert contribution_hooks.before_push(blocks, "model", 0).keys() == {0}
        assert not contribution_hooks.before_push(blocks, "model", 1)
    assert [one.step for one in read_forged(tmp_path / "lies")] == [1]


def test_honest_workers_are_left_alone(tmp_path: Path) -> None:
    loss = torch.nn.functional.cross_entropy
    with closing(Attacker([spec("sign"), spec("label-flip")], tmp_path / "lies", 0, world=2)):
        vector = torch.ones(3)
        contribution_hooks.before_encode([vector], "model", 0)
        assert vector.tolist() == [1.0, 1.0, 1.0]
        assert torch.nn.functional.cross_entropy is loss


def test_labels_are_flipped_where_a_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.testing.attacker.takes_part", lambda: True)
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(1), requires_grad=True)
    labels = torch.tensor([0, 9, 3, -100])
    loss, honest_loss = torch.nn.CrossEntropyLoss(), torch.nn.functional.cross_entropy
    with closing(Attacker([spec("label-flip")], tmp_path / "lies", 1, world=2)):
        torch.testing.assert_close(loss(logits, labels), honest_loss(logits, torch.tensor([9, 0, 6, -100])))
        with torch.no_grad():
            torch.testing.assert_close(loss(logits, labels), honest_loss(logits, labels))
    torch.testing.assert_close(loss(logits, labels), honest_loss(logits, labels))
    assert len(read_forged(tmp_path / "lies")) == 1


def test_a_liar_that_told_no_lie_is_named(tmp_path: Path) -> None:
    attacks = [spec("sign"), spec("zero", workers=[0, 1])]
    with closing(Attacker(attacks, tmp_path / "lies", 1, world=2)):
        contribution_hooks.before_encode([torch.ones(3)], "model", 0)
    with pytest.raises(AssertionError, match=r"never lied: zero of workers 0 and 1: worker 0$"):
        assert_forged(attacks, tmp_path / "lies")
