"""Versions of tensors: a whole, what changed since the version before it, and a description, as ordinary objects.

`VersionedObjects.put` puts the whole first and the description last, so a version is there once its description is.
`load` reads the description, gets what takes the fewest bytes (`version_path`), checks digests, decodes all of it, and
then writes. What the reader has already, the digest of its tensors tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from offbeat.errors import ObjectError, ObjectTimeoutError, OffbeatError
from offbeat.objects import delta
from offbeat.objects.packed_tensors import TensorLayout, digest_of_parts
from offbeat.objects.tensor_writes import TensorWrites
from offbeat.objects.version_path import cheapest
from offbeat.protocol.object_versions import (
    DELTA,
    DESCRIPTION,
    MAX_RECORDS,
    VersionDescription,
    VersionRecord,
    delta_name,
    description_name,
    description_of,
    pack_part,
)
from offbeat.protocol.objects import ObjectMeta, ObjectName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from torch import Tensor

    from offbeat.objects.object_future import CallDeadline, ObjectFuture
    from offbeat.objects.store_access import FoundObject, StoreAccess
    from offbeat.objects.version_path import VersionPath

    Tensors = Tensor | Mapping[str, Tensor]

_LOOK = timedelta(seconds=0.5)  # after which it is looked whether what is waited for is still there
_MAX_ID = 256 - len(DESCRIPTION)


@dataclass(frozen=True)
class WholeVersion:
    """A version, all of which is mapped here.

    Args:
        record: what others are to know of it.
        layout: of its tensors.
        memory: of its whole.
    """

    record: VersionRecord
    layout: TensorLayout
    memory: memoryview


class VersionedObjects:
    """The versions in a store; on any thread.

    Args:
        access: to the store.
    """

    def __init__(self, access: StoreAccess) -> None:
        self.access = access

    def put(
        self,
        id_: str,
        version: int,
        tensors: Tensors,
        *,
        base: WholeVersion | None,
        describe: Callable[[VersionRecord], Sequence[VersionRecord]],
        deadline: CallDeadline,
    ) -> WholeVersion:
        """Put a version.

        Args:
            base: that the delta begins with; None for no delta.
            describe: this version's record -> those of all versions that there are with it.

        Raises:
            DisagreementError: if the version stands for other bytes already.
            ObjectError: if there is no room for it, or the tensors cannot be put.
            ObjectTimeoutError: if it has taken too long.
        """
        check_id(id_, version)
        name = ObjectName(id_, version)
        tensors = _sorted(tensors)
        layout = TensorLayout.of(tensors)
        is_new = self.access.put(name, layout.meta, layout.parts(tensors)).get(deadline)
        try:
            made = self.whole(name, deadline)
            if base is not None and base.layout == layout:
                made = self._put_delta(name, made, base, deadline)
            records = tuple(describe(made.record))[-MAX_RECORDS:]
            data = pack_part(VersionDescription(records))
            self._put_bytes(description_name(id_, version), [memoryview(data)], deadline)
        except OffbeatError:
            if is_new:  # nobody will describe it
                for one in (description_name(id_, version), delta_name(id_, version), name):
                    self.access.delete(one)
            raise
        return made

    def whole(self, name: ObjectName, deadline: CallDeadline) -> WholeVersion:
        """Get all of a version.

        Raises:
            ObjectError: if it is lost, was deleted, or is not what it should be.
            ObjectTimeoutError: if it has taken too long.
        """
        found = self._get(name, deadline)
        memory = found.view
        layout = TensorLayout.read(found.meta, memory)
        record = VersionRecord(name.version, digest_of_parts([memory]), found.meta.size_bytes)
        return WholeVersion(record, layout, memory)

    def base(self, id_: str, version: int, deadline: CallDeadline) -> tuple[WholeVersion, tuple[VersionRecord, ...]]:
        """Get a version as the base of a delta, and what is known of versions up to it.

        Raises:
            ObjectError: if nobody has it.
        """
        known = self._known(id_, deadline)
        if version not in known:
            there = f"versions {_listed(known)} are there" if known else "no version is"
            raise ObjectError(
                f"Cannot make a delta to {id_!r} version {version}: nobody has all of it, and {there}. Put the tensors "
                "without base=, or with one of these."
            )
        whole = self.whole(ObjectName(id_, version), deadline)
        about = description_name(id_, version)
        if version not in self._known(about.id, deadline):
            return whole, (whole.record,)
        return whole, self.described(about, deadline).records

    def described(self, about: ObjectName, deadline: CallDeadline) -> VersionDescription:
        """Get the description of a version."""
        return description_of(self._get(about, deadline).view)

    def load(self, id_: str, version: int, into: Tensors, deadline: CallDeadline) -> str:
        """Write a version into tensors, all of it or nothing; waits until it is there.

        Returns:
            Why it cannot be had any more; "" if it was loaded.

        Raises:
            ObjectError: if it is not as its description says, or does not fit the tensors.
            ObjectTimeoutError: if it has not come in time.
        """
        name = ObjectName(id_, version)
        into = _sorted(into)
        layout = TensorLayout.of(into)
        writes = TensorWrites({"": into} if isinstance(into, torch.Tensor) else into)
        records = self._records(name, deadline, is_one=not layout.head)
        if isinstance(records, str):
            return records
        held = digest_of_parts(layout.parts(into))
        gone: dict[ObjectName, str] = {}
        here: set[ObjectName] | None = None
        while True:
            path = cheapest(id_, records, held=held, here=here or (), gone=gone)
            if path is None:
                return f"Cannot get {name}: what leads to it is not there any more. {' '.join(gone.values())}".strip()
            if path.whole is not None and here is None:
                here = self._here()
                continue
            found = self._get_all(path.names(id_), gone, name, deadline)
            if found is not None:
                break
        self._prepare(name, path, {record.version: record for record in records}, found, layout, writes)
        writes.write_()
        return ""

    def _prepare(
        self,
        name: ObjectName,
        path: VersionPath,
        records: Mapping[int, VersionRecord],
        found: list[FoundObject],
        layout: TensorLayout,
        writes: TensorWrites,
    ) -> None:
        """Check and decode what was got, and have it written later."""
        if path.whole is not None:
            whole, *found = found
            memory = _checked(ObjectName(name.id, path.whole), whole, records[path.whole].digest)
            theirs = TensorLayout.read(whole.meta, memory)
            if why := layout.why_not(theirs):
                raise ObjectError(f"Cannot load {name} into these tensors: {why}.")
            writes.replace(list(theirs.tensors_in(memory).values()))
        for version, one in zip(path.deltas, found, strict=True):
            memory = _checked(delta_name(name.id, version), one, records[version].delta_digest)
            writes.change(delta.decode(layout, memory))

    def _records(self, name: ObjectName, deadline: CallDeadline, *, is_one: bool) -> Sequence[VersionRecord] | str:
        """The records of a version and those before it, or why it cannot be had any more."""
        about, plain = description_name(name.id, name.version), None
        future = self.access.get(about, lambda found: found)
        try:
            while not future.done():
                known = self._known(about.id, deadline)
                is_past = bool(known) and known[-1] > name.version and name.version not in known
                if not plain and (is_past or not known) and name.version in self._known(name.id, deadline):
                    plain = self.whole(name, deadline)  # it was put without a description, or that is still to come
                    if is_one:
                        return (plain.record,)
                    if not plain.layout.head:
                        return f"Cannot load {name} into several tensors: it is one tensor, {plain.layout.meta}."
                if is_past:
                    return f"Cannot get {name}: it is not there any more; versions {_listed(known)} are."
                if not future.wait(_LOOK) and deadline.is_over:
                    raise _too_late(name, name, future, deadline)
            records = description_of(future.outcome().view).records
        finally:
            future.stop()
        if records[-1].version != name.version:
            raise ObjectError(f"Cannot get {name}: its description is one of version {records[-1].version}.")
        return records

    def _known(self, id_: str, deadline: CallDeadline) -> tuple[int, ...]:
        """The versions of an id that some store has all of."""
        future = self.access.versions(id_)
        try:
            return future.get(deadline).versions
        finally:
            future.stop()

    def _get_all(
        self,
        names: Sequence[ObjectName],
        gone: dict[ObjectName, str],
        wanted: ObjectName,
        deadline: CallDeadline,
    ) -> list[FoundObject] | None:
        """Get objects; None if one of them was not to be had, which is noted."""
        futures = {name: self.access.get(name, lambda found: found) for name in names}
        try:
            for name, future in futures.items():
                while not future.wait(_LOOK):
                    if deadline.is_over:
                        raise _too_late(wanted, name, future, deadline)
                    if name.version not in self._known(name.id, deadline):
                        gone[name] = f"Nobody has {name}."
                        return None
                if future.error is not None:
                    gone[name] = str(future.error)
                    return None
            return [future.value for future in futures.values()]
        finally:
            for future in futures.values():
                future.stop()

    def _here(self) -> set[ObjectName]:
        """The objects that are in this machine's store."""
        return {one.name for one in self.access.status().objects if one.have_bytes == one.meta.size_bytes}

    def _put_delta(
        self, name: ObjectName, made: WholeVersion, base: WholeVersion, deadline: CallDeadline
    ) -> WholeVersion:
        parts = delta.encode(made.layout, base.memory, made.memory)
        if parts is None:
            return made
        self._put_bytes(delta_name(name.id, name.version), parts, deadline)
        record = VersionRecord(
            name.version,
            made.record.digest,
            made.record.size_bytes,
            base=base.record.version,
            delta_bytes=delta.size_of(parts),
            delta_digest=digest_of_parts(parts),
        )
        return WholeVersion(record, made.layout, made.memory)

    def _put_bytes(self, name: ObjectName, parts: Sequence[memoryview], deadline: CallDeadline) -> None:
        size = sum(map(len, parts))
        self.access.put(name, ObjectMeta("uint8", (size,), size), parts).get(deadline)

    def _get(self, name: ObjectName, deadline: CallDeadline) -> FoundObject:
        future = self.access.get(name, lambda found: found)
        try:
            return future.get(deadline)
        finally:
            future.stop()


def check_id(id_: str, version: int = 0) -> None:
    """Refuse ids that others have a use for, and numbers that are no version's.

    Raises:
        ObjectError: if it is one.
    """
    if id_.endswith((DELTA, DESCRIPTION)):
        raise ObjectError(f"Cannot put {id_!r}: ids that end in {DELTA} or {DESCRIPTION} belong to versions.")
    if not 1 <= len(id_) <= _MAX_ID or not 0 <= version < 1 << 40:
        raise ObjectError(
            f"Cannot put {id_[:40]!r} version {version}: an id with versions has 1 to {_MAX_ID} characters, and a "
            f"version is 0 to {(1 << 40) - 1}."
        )


def _sorted(tensors: Tensors) -> Tensors:
    return tensors if isinstance(tensors, torch.Tensor) else dict(sorted(tensors.items()))


def _too_late(
    wanted: ObjectName, name: ObjectName, future: ObjectFuture[Any], deadline: CallDeadline
) -> ObjectTimeoutError:
    progress = future.progress or "nothing is known"
    what = progress if name == wanted else f"it needs {name}, and {progress}"
    return ObjectTimeoutError(f"Cannot get {wanted} within {deadline.timeout:g} s: {what}.")


def _checked(name: ObjectName, found: FoundObject, digest: str) -> memoryview:
    memory = found.view
    if (is_one := digest_of_parts([memory])) != digest:
        raise ObjectError(f"Cannot use {name}: its digest is {is_one}, and its description says {digest}.")
    return memory


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions[-4:]))
