"""Versions and deltas between processes: a publisher, readers that come late or fall back, and losses."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from offbeat.errors import DisagreementError, ObjectError, ObjectTimeoutError
from offbeat.objects.client import embedded
from offbeat.objects.packed_tensors import TensorLayout, digest_of_parts
from offbeat.protocol.object_versions import (
    VersionDescription,
    VersionRecord,
    delta_name,
    description_name,
    pack_part,
)
from offbeat.protocol.objects import ObjectMeta, ObjectName
from offbeat.wire.credentials import Token
from tests.cli.test_objects import TOKEN, Served, served
from tests.patience import soon

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from offbeat.objects.client import ObjectClient

NUMEL = 400_000
WHOLE_BYTES = NUMEL * 4
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Served]]:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(served(tmp_path, "--directory"))
        others = [stack.enter_context(served(tmp_path, "--directories", first.directories)) for _ in range(2)]
        yield [first, *others]


class Model(torch.nn.Module):
    """A model whose embedding and output are tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(NUMEL // 8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.output = torch.nn.Linear(8, NUMEL // 8, bias=False)
        self.output.weight = self.embedding.weight

    def step(self, number: int) -> None:
        """Change a few of the weights."""
        with torch.no_grad():
            self.embedding.weight[number] += 1
            assert self.norm.running_mean is not None
            self.norm.running_mean += 1


def bits(tensors: Mapping[str, Tensor]) -> str:
    return digest_of_parts(TensorLayout.of(tensors).parts(tensors))


def sent_bytes(client: ObjectClient) -> int:
    return client.status().sent_bytes


def test_a_reader_follows(three: list[Served]) -> None:
    first, second, _ = three
    with first.client() as trainer, second.client() as rollout:
        mine, theirs = Model(1), Model(2)
        publisher, follower = trainer.publisher("policy"), rollout.follow("policy", theirs)
        assert follower.update(waits=False) is None
        with pytest.raises(
            ObjectTimeoutError, match=r"Cannot follow 'policy' within 0.2 s: nobody has published a newer"
        ):
            follower.update(timeout=0.2)
        assert publisher.publish(mine) == 0
        assert follower.update(timeout=20) == 0
        assert bits(theirs.state_dict()) == bits(mine.state_dict())
        assert theirs.output.weight is theirs.embedding.weight
        whole = sent_bytes(trainer)
        assert WHOLE_BYTES <= whole < 1.05 * WHOLE_BYTES, "the tied weights travel once"

        for number in range(1, 4):
            mine.step(number)
            assert publisher.publish(mine) == number
            assert follower.update(timeout=20) == number
            assert bits(theirs.state_dict()) == bits(mine.state_dict())
        assert sent_bytes(trainer) - whole < 10_000
        assert follower.update(waits=False) == 3
        with pytest.raises(ObjectTimeoutError, match=r"Cannot follow 'policy' beyond version 3 within 0.1 s"):
            follower.update(timeout=0.1)


def test_late_readers_and_readers_that_fell_back(three: list[Served]) -> None:
    with three[0].client() as trainer, three[1].client() as early, three[2].client() as late:
        mine, one, other = Model(1), Model(2), Model(3)
        publisher = trainer.publisher("policy")
        publisher.publish(mine)
        reader = early.follow("policy", one)
        reader.update(timeout=20)
        for number in range(1, 3):
            mine.step(number)
            publisher.publish(mine)
        before = sent_bytes(trainer)
        assert reader.update(timeout=20) == 2, "two versions at once"
        assert bits(one.state_dict()) == bits(mine.state_dict())
        assert sent_bytes(trainer) - before < 10_000
        assert late.follow("policy", other).update(timeout=20) == 2
        assert bits(other.state_dict()) == bits(mine.state_dict())
        before = sum(sent_bytes(client) for client in (trainer, early, late))
        assert late.follow("policy", Model(4)).update(timeout=20) == 2, "a second reader of one machine gets it there"
        mine.step(3)
        publisher.publish(mine)
        assert late.follow("policy", other := Model(5)).update(timeout=20) == 3, "from the whole that is there, too"
        assert bits(other.state_dict()) == bits(mine.state_dict())
        assert sum(sent_bytes(client) for client in (trainer, early, late)) - before < 10_000


@pytest.mark.parametrize(("share", "times"), [(0.02, 30), (0.002, 150)])
def test_few_bytes_travel(three: list[Served], share: float, times: float) -> None:
    with three[0].client() as trainer, three[1].client() as rollout:
        mine = torch.randn(12 << 20).bfloat16()
        theirs = torch.zeros_like(mine)
        publisher, follower = trainer.publisher("policy"), rollout.follow("policy", {"w": theirs})
        publisher.publish({"w": mine})
        follower.update(timeout=20)
        whole = sent_bytes(trainer)
        mine.view(torch.int16)[torch.randperm(mine.numel())[: int(share * mine.numel())]] ^= 1
        publisher.publish({"w": mine})
        follower.update(timeout=20)
        assert torch.equal(theirs, mine)
        sent = sent_bytes(trainer) - whole
        assert sent > 64 << 10, "what travels in messages is not counted"
        assert whole / sent > times


def test_what_the_reader_changed_itself_is_replaced(three: list[Served]) -> None:
    with three[0].client() as trainer, three[1].client() as rollout:
        mine, theirs = Model(1), Model(1)
        publisher, follower = trainer.publisher("policy"), rollout.follow("policy", theirs)
        publisher.publish(mine)
        follower.update(timeout=20)
        theirs.step(17)
        mine.step(1)
        publisher.publish(mine)
        follower.update(timeout=20)
        assert bits(theirs.state_dict()) == bits(mine.state_dict())


def test_old_versions_go(three: list[Served]) -> None:
    with three[0].client() as trainer, three[1].client() as rollout:
        tensors, publisher = {"w": torch.zeros(NUMEL)}, trainer.publisher("policy", keep=2)
        for _ in range(12):
            tensors["w"][:60_000] += 1  # a delta of 15 % of the whole
            publisher.publish(tensors)
        assert soon(lambda: len(trainer.versions("policy")) == 2)
        assert trainer.versions("policy") == [10, 11]
        deltas = trainer.versions("policy@delta")
        assert deltas[-1] == 11
        assert 3 <= len(deltas) <= 6
        used = trainer.status().used_bytes
        assert used < 3.2 * WHOLE_BYTES
        here = {"w": torch.zeros(NUMEL)}
        with pytest.raises(
            ObjectError, match=r"Cannot get 'policy' version 1: it is not there any more; versions .*11"
        ):
            rollout.get("policy", version=1, into=here, timeout=20)
        rollout.get("policy", version=10, into=here, timeout=20)
        assert here["w"][0] == 11


def test_many_small_changes(tmp_path: Path) -> None:
    with served(tmp_path, "--directory") as first, first.client() as trainer:
        tensors, publisher = {"w": torch.zeros(NUMEL)}, trainer.publisher("policy")
        for number in range(300):
            tensors["w"][number] = 1
            publisher.publish(tensors)
        assert soon(lambda: len(trainer.versions("policy@delta")) <= 256)
        assert soon(lambda: len(trainer.versions("policy@description")) <= 256), "as many as one can list"
        here = {"w": torch.zeros(NUMEL)}
        trainer.get("policy", version=299, into=here, timeout=20)
        assert bits(here) == bits(tensors)


def test_a_store_without_room(tmp_path: Path) -> None:
    with (
        served(tmp_path, "--directory", "--memory-mib", 9) as first,
        served(tmp_path, "--directories", first.directories, "--memory-mib", 2) as second,
        first.client() as trainer,
        second.client() as rollout,
    ):
        theirs = {"w": torch.zeros(NUMEL)}
        for name in ("one", "another"):
            trainer.put(name, {"w": torch.ones(NUMEL)})
            assert rollout.follow(name, theirs).update(timeout=20) == 0, "the reader's store drops the one before it"
        mine, publisher = {"w": torch.zeros(NUMEL)}, trainer.publisher("policy")
        publisher.publish(mine)
        mine["w"][: NUMEL // 2] = 1
        # "another" is dropped for it, as the reader has that, too.
        trainer.put("filler", torch.zeros((9 << 20) - 3 * WHOLE_BYTES - 1_000_000, dtype=torch.uint8))
        with pytest.raises(ObjectError, match="Cannot keep 'policy@delta' version 1"):
            publisher.publish(mine)
        assert soon(lambda: trainer.versions("policy") == [0]), "what nobody will describe is deleted"
        trainer.delete("filler")
        trainer.delete("one")
        assert soon(lambda: trainer.versions("filler") == trainer.versions("one") == [])
        number = publisher.publish(mine)
        follower = rollout.follow("policy", theirs)
        assert follower.update(timeout=20) == number
        assert bits(theirs) == bits(mine)


def test_by_hand(three: list[Served]) -> None:
    with three[0].client() as one, three[1].client() as other:
        before = torch.arange(NUMEL).float()
        after = before.clone()
        after[5] = -1
        one.put("w", before)
        one.put("w", after, version=1, base=0)
        here = torch.zeros(NUMEL)
        other.get("w", into=here, timeout=20)
        assert torch.equal(here, before)
        sent = sent_bytes(one)
        other.get("w", version=1, into=here, timeout=20)
        assert torch.equal(here, after)
        assert sent_bytes(one) - sent < 1000
        assert torch.equal(other.get("w", version=1, timeout=20), after), "the whole is an object as any other"

        tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}
        one.put("several", tensors)
        got = other.get_tensors("several", timeout=20)
        assert bits(got) == bits(tensors)


def test_what_was_published_stays_as_it_was(three: list[Served]) -> None:
    with three[0].client() as one, three[1].client() as other:
        tensors = {"w": torch.zeros(NUMEL)}
        publisher = one.publisher("policy")
        publisher.publish(tensors)
        tensors["w"][:9] = 1
        publisher.publish(tensors)
        tensors["w"].fill_(7)
        here = {"w": torch.full((NUMEL,), 3.0)}
        other.get("policy", version=0, into=here, timeout=20)
        assert here["w"].abs().sum() == 0
        other.get("policy", version=1, into=here, timeout=20)
        assert here["w"].sum() == 9


class TestRefused:
    def test_a_base_that_nobody_has(self, three: list[Served]) -> None:
        with three[0].client() as one:
            tensors = {"w": torch.zeros(NUMEL)}
            with pytest.raises(ObjectError, match="to 'policy' version 3: nobody has all of it, and no version is"):
                one.put("policy", tensors, version=4, base=3)
            one.put("policy", tensors, version=1)
            with pytest.raises(ObjectError, match=r"versions 1 are there. Put the tensors without base="):
                one.put("policy", tensors, version=4, base=3)
            with pytest.raises(ObjectError, match="a base is an earlier version"):
                one.put("policy", tensors, version=1, base=1)

    def test_tensors_that_are_not_alike(self, three: list[Served]) -> None:
        with three[0].client() as one, three[1].client() as other:
            one.publisher("policy").publish({"a": torch.ones(3), "b": torch.ones(2)})
            for wrong, says in (
                ({"a": torch.zeros(3)}, "it has 'b' (1 in all), which you do not"),
                ({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, "it has no 'c' (1 in all)"),
                ({"a": torch.zeros(3), "b": torch.zeros(4)}, r"its 'b' is float32[2], and yours float32[4]"),
                ({"a": torch.zeros(3), "b": torch.zeros(2).half()}, r"its 'b' is float32[2], and yours float16[2]"),
            ):
                with pytest.raises(ObjectError) as caught:
                    other.follow("policy", wrong).update(timeout=20)
                assert says in str(caught.value)
                assert not any(tensor.any() for tensor in wrong.values()), "nothing is written"

    def test_two_publishers(self, three: list[Served]) -> None:
        with three[0].client() as one, three[1].client() as other:
            first, second = one.publisher("policy"), other.publisher("policy")
            first.publish({"w": torch.zeros(NUMEL)})
            assert second.publish({"w": torch.ones(NUMEL)}) == 1
            with pytest.raises(DisagreementError, match="Cannot publish 'policy' version 1"):
                first.publish({"w": torch.full((NUMEL,), 2.0)})
            assert first.publish({"w": torch.full((NUMEL,), 2.0)}) == 2, "it looks which versions there are"

    def test_numbers_and_names(self, three: list[Served]) -> None:
        with three[0].client() as one:
            publisher = one.publisher("policy")
            publisher.publish({"w": torch.zeros(3)}, version=5)
            with pytest.raises(ObjectError, match="Cannot publish 'policy' version 5: version 5 is there already"):
                publisher.publish({"w": torch.zeros(3)}, version=5)
            for name in ("policy@delta", "policy@description", "", "x" * 300):
                with pytest.raises(ObjectError, match="Cannot put"):
                    one.publisher(name)
            with pytest.raises(ObjectError, match="belong to versions"):
                one.put("policy@delta", torch.zeros(3))


def test_a_version_that_is_damaged_is_not_loaded(three: list[Served]) -> None:
    with three[0].client() as one, three[1].client() as other:
        tensors = {"w": torch.zeros(NUMEL)}
        one.put("policy", tensors)
        here = {"w": torch.ones(NUMEL)}
        other.get("policy", into=here, timeout=20)
        one.put("policy@nothing", torch.zeros(3))
        one._access.put(*described("policy", 1, digest="abc", base=0)).get(20)
        junk = torch.zeros(100, dtype=torch.uint8)
        layout = TensorLayout.of(junk)
        one._access.put(delta_name("policy", 1), layout.meta, layout.parts(junk)).get(20)
        with pytest.raises(ObjectError, match="Cannot use 'policy@delta' version 1: its digest is"):
            other.get("policy", version=1, into=here, timeout=20)
        assert not here["w"].any()


def described(id_: str, version: int, *, digest: str, base: int) -> tuple[ObjectName, ObjectMeta, list[memoryview]]:
    """The description of a version whose delta is said to be what it is not."""
    zeros = {"w": torch.zeros(NUMEL)}
    records = (
        VersionRecord(base, bits(zeros), WHOLE_BYTES),
        VersionRecord(version, digest, WHOLE_BYTES, is_kept=False, base=base, delta_bytes=100, delta_digest="1"),
    )
    data = pack_part(VersionDescription(records))
    return description_name(id_, version), ObjectMeta("uint8", (len(data),), len(data)), [memoryview(data)]


PUBLISHER = """
import sys, torch
from offbeat.objects.client import connect
from tests.cli.test_object_versions import Model, bits
model, publisher = Model(int(sys.argv[2])), connect(sys.argv[1]).publisher("policy")
for number, line in enumerate(sys.stdin):
    model.step(number)
    print(publisher.publish(model), bits(model.state_dict()), flush=True)
"""
READER = """
import sys, torch
from offbeat.objects.client import connect
from tests.cli.test_object_versions import Model, bits
model = Model(99)
follower = connect(sys.argv[1]).follow("policy", model)
while True:
    print(follower.update(), bits(model.state_dict()), flush=True)
"""


class Task:
    """A task in a process of its own."""

    def __init__(self, code: str, served: Served, *arguments: object) -> None:
        command = [sys.executable, "-c", code, served.client_address, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OFFBEAT_TOKEN": TOKEN},
        )

    def step(self) -> str:
        """Have a publisher publish; what it says of it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.says()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def tasks() -> Iterator[list[Task]]:
    made: list[Task] = []
    try:
        yield made
    finally:
        for task in made:
            task.kill()


def test_a_publisher_is_killed_and_started_again(three: list[Served]) -> None:
    with tasks() as made:
        publisher = Task(PUBLISHER, three[0], 1)
        readers = [Task(READER, where) for where in three[1:]]
        made += [publisher, *readers]
        for number in range(3):
            said = publisher.step()
            assert said.split()[0] == str(number)
            assert [reader.says() for reader in readers] == [said, said]
        publisher.kill()
        again, late = Task(PUBLISHER, three[0], 7), Task(READER, three[2])
        made += [again, late]
        assert late.says() == said, "the store still has what the publisher has put"
        said = again.step()
        assert said.split()[0] == "3"
        assert [reader.says() for reader in (*readers, late)] == [said] * 3
        said = again.step()
        assert [reader.says() for reader in (*readers, late)] == [said] * 3


def test_the_store_of_the_publisher_is_killed(tmp_path: Path) -> None:
    """Readers have what they have; a late one gets that from them, and the next version is another machine's."""
    with served(tmp_path, "--directory") as keeper, tasks() as made, contextlib.ExitStack() as stack:
        lost, left, other = (stack.enter_context(served(tmp_path, "--directories", keeper.directories)) for _ in "abc")
        publisher, reader = Task(PUBLISHER, lost, 1), Task(READER, left)
        made += [publisher, reader]
        for _ in range(2):
            said = publisher.step()
            assert reader.says() == said
        lost.kill()
        late, again = Task(READER, other), Task(PUBLISHER, other, 5)
        made += [late, again]
        said = again.step()
        assert said.split()[0] == "2", "though nobody has all of version 1"
        while (says := late.says()) != said:
            assert says.split()[0] in "01"
        assert reader.says() == said


def test_the_directory_is_killed_and_started_again(tmp_path: Path) -> None:
    with (
        served(tmp_path, "--directory") as first,
        served(tmp_path, "--directories", first.directories) as second,
        served(tmp_path, "--directories", first.directories) as third,
        second.client() as trainer,
        third.client() as rollout,
    ):
        mine, theirs = Model(1), Model(2)
        publisher, follower = trainer.publisher("policy"), rollout.follow("policy", theirs)
        publisher.publish(mine)
        assert follower.update(timeout=20) == 0
        first.kill()
        with pytest.raises(ObjectTimeoutError, match=r"Cannot follow 'policy' beyond version 0 within 2 s"):
            follower.update(timeout=2)
        with (
            concurrent.futures.ThreadPoolExecutor() as pool,
            served(tmp_path, "--directory", "--directory-port", first.directories.rpartition(":")[2]),
        ):
            waiting = pool.submit(follower.update, timeout=40)
            mine.step(1)
            assert publisher.publish(mine, timeout=40) == 1
            assert waiting.result(40) == 1
            assert bits(theirs.state_dict()) == bits(mine.state_dict())


def test_versions_are_deleted_while_somebody_follows(three: list[Served]) -> None:
    with three[0].client() as one, three[1].client() as other:
        mine, theirs = Model(1), Model(2)
        publisher, follower = one.publisher("policy"), other.follow("policy", theirs)
        publisher.publish(mine)
        follower.update(timeout=20)
        mine.step(1)
        publisher.publish(mine)
        one.delete("policy", version=1)
        assert soon(lambda: one.versions("policy") == [0])
        assert follower.update(waits=False) == 0
        mine.step(2)
        publisher.publish(mine)
        assert follower.update(timeout=20) == 2, "the whole, since the delta has no base"
        assert bits(theirs.state_dict()) == bits(mine.state_dict())

        mine.step(3)
        publisher.publish(mine)
        one._access.delete(ObjectName("policy", 3))
        one._access.delete(delta_name("policy", 3))
        assert soon(lambda: 3 not in one.versions("policy"))
        with pytest.raises(
            ObjectTimeoutError, match=r"what leads to it is not there any more. Nobody has 'policy@delta'"
        ):
            follower.update(timeout=2)
        assert follower.version == 2
        mine.step(4)
        publisher.publish(mine)
        assert follower.update(timeout=20) == 4


def test_a_store_in_this_process_publishes(tmp_path: Path) -> None:
    with served(tmp_path, "--directory") as first:
        directories = first.directories.split(",")
        with embedded(directories, credentials=Token(TOKEN.encode())) as here, first.client() as there:
            mine, theirs = Model(1), Model(2)
            publisher, follower = here.publisher("policy"), there.follow("policy", theirs)
            for number in range(3):
                mine.step(number)
                publisher.publish(mine)
                assert follower.update(timeout=20) == number
                assert bits(theirs.state_dict()) == bits(mine.state_dict())
            with pytest.raises(ObjectTimeoutError):
                here.follow("other", theirs).update(timeout=0.1)
            back = Model(3)
            assert here.follow("policy", back).update(timeout=20) == 2
            assert bits(back.state_dict()) == bits(mine.state_dict())


TRAIN = """
import sys
import torch, offbeat
from offbeat.objects.client import connect
with offbeat.init({plan}) as run:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 100)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    publisher = connect(sys.argv[1]).publisher("policy") if run.is_first else None
    for step in range(3):
        model(torch.randn(3, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if publisher is not None:
            publisher.publish(model)
    if run.is_first:
        torch.save(model.module.state_dict(), "weights.pt")
"""


@pytest.mark.parametrize("plan", ["", "offbeat.Plan(scheduling=offbeat.Priority())"])
def test_a_run_publishes(three: list[Served], tmp_path: Path, plan: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(plan=plan))
    command = [sys.executable, "-m", "offbeat", "run", "--workers", "2", "train.py", three[0].client_address]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OFFBEAT_TOKEN": TOKEN}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with three[1].client() as reader:
        model = torch.nn.Linear(300, 100)
        assert reader.follow("policy", model).update(timeout=20) == 2
        assert bits(model.state_dict()) == bits(torch.load(tmp_path / "weights.pt"))


def test_the_example(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples/weight_sync.py"
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    begin = [int(version) for version in re.findall(r"A reader begins with version (\d+)", done.stdout)]
    ends = [int(version) for version in re.findall(r"A reader leaves with version (\d+)", done.stdout)]
    assert begin == [0, 0, 10]
    assert sorted(ends) == [10, 19, 19]
    found = re.search(r"20 versions of ([\d,]+) bytes each: the readers' store received ([\d,]+) bytes", done.stdout)
    assert found is not None, done.stdout
    whole, sent = (int(number.replace(",", "")) for number in found.groups())
    assert whole < sent < 4 * whole, "one that two readers share, one for the late one, and deltas"
