"""A trainer's and a reader's view of versions: publish a model after each step, follow it elsewhere.

The state of a module is what its `state_dict` returns, so where an offbeat `Run` still waits for parameters of the step
before, that waits for them, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from offbeat.errors import DisagreementError, ObjectError, OffbeatError
from offbeat.objects.object_future import CallDeadline
from offbeat.objects.versions import check_id
from offbeat.protocol.object_versions import DESCRIPTION, MAX_RECORDS, VersionRecord, delta_name, description_name
from offbeat.protocol.objects import ObjectName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from offbeat.objects.versions import VersionedObjects, WholeVersion

_WRAPPED = "module."


class Publisher:
    """Publishes versions of tensors under an id; made by `ObjectClient.publisher`.

    Args:
        objects: the versions in a store.
        name: of what is published.
        keep: the number of versions whose whole is kept.

    Attributes:
        version: the last one; None before the first.

    Raises:
        ObjectError: if the name cannot be one, or `keep` is less than 1.
    """

    def __init__(self, objects: VersionedObjects, name: str, keep: int = 2) -> None:
        check_id(name)
        if keep < 1:
            raise ObjectError(f"Cannot publish {name!r} with keep={keep}: the last version has to be kept.")
        self._objects, self._name, self._keep = objects, name, keep
        self._last: WholeVersion | None = None
        self._records: tuple[VersionRecord, ...] | None = None
        self.version: int | None = None

    def publish(
        self,
        source: torch.nn.Module | Mapping[str, Tensor],
        *,
        version: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Publish a version: the tensors are copied, so they may change once this returns.

        Args:
            source: a module, of which the parameters and buffers are published; or tensors by name.
            version: its number, higher than all before; the next one if None.
            timeout: in seconds; None for as long as it takes.

        Returns:
            Its number.

        Raises:
            DisagreementError: if somebody else has published other tensors under this number.
            ObjectError: if there is no room for it, or the number is too low.
            ObjectTimeoutError: if it has taken too long.
        """
        deadline = CallDeadline(timeout)
        before = self._before(deadline)
        number = before + 1 if version is None else version
        if number <= before:
            raise ObjectError(f"Cannot publish {self._name!r} version {number}: version {before} is there already.")
        retained: list[VersionRecord] = []

        def describe(record: VersionRecord) -> Sequence[VersionRecord]:
            retained[:] = self._retained((*(self._records or ()), record))
            return retained

        try:
            made = self._objects.put(
                self._name,
                number,
                tensors_of(source),
                base=self._last,
                describe=describe,
                deadline=deadline,
            )
        except OffbeatError as error:
            self._records = None  # look again which versions there are
            if isinstance(error, DisagreementError):
                raise DisagreementError(
                    f"Cannot publish {self._name!r} version {number}: another publisher has published other tensors "
                    "under this number. One publisher publishes under an id; the next publish() continues after it."
                ) from error
            raise
        self._delete_all_but(retained)
        self._records, self._last, self.version = tuple(retained), made, number
        return number

    def _before(self, deadline: CallDeadline) -> int:
        """The highest version that was published, by whomever."""
        if self._records is not None and self.version is not None:
            return self.version
        access, name = self._objects.access, self._name
        ids = (name, name + DESCRIPTION)
        known = [access.versions(id_).get(deadline) for id_ in ids]
        described, self._records = known[1].versions, ()
        if described:
            self._records = self._objects.described(description_name(name, described[-1]), deadline).records
        return max(one.highest for one in known)

    def _retained(self, records: Sequence[VersionRecord]) -> list[VersionRecord]:
        """The records of what is kept: some wholes, and as many deltas as can be listed and are smaller than one."""
        left_bytes, retained, needed = records[-1].size_bytes, list[VersionRecord](), set[int]()
        for number, record in enumerate(reversed(records)):
            left_bytes -= record.delta_bytes
            has_delta = record.base is not None and left_bytes > 0 and number < MAX_RECORDS - 1
            if not has_delta:
                record = msgspec.structs.replace(record, base=None, delta_bytes=0, delta_digest="")
                left_bytes = 0 if number else left_bytes  # what is older leads nowhere
            record = msgspec.structs.replace(record, is_kept=record.is_kept and number < self._keep)
            if record.base is not None:
                needed.add(record.base)
            if record.is_kept or record.base is not None or record.version in needed:
                retained.append(record)
        return retained[::-1]

    def _delete_all_but(self, retained: Sequence[VersionRecord]) -> None:
        left = {record.version: record for record in retained}
        for record in self._records or ():
            now = left.get(record.version)
            if record.is_kept and not (now and now.is_kept):
                self._objects.access.delete(ObjectName(self._name, record.version), when_read=True)
            if record.base is not None and not (now and now.base is not None):
                self._objects.access.delete(delta_name(self._name, record.version), when_read=True)
            if not now or not (now.is_kept or now.base is not None):
                self._objects.access.delete(description_name(self._name, record.version))


class Follower:
    """Loads versions into tensors as they are published; made by `ObjectClient.follow`.

    Args:
        objects: the versions in a store.
        name: of what is followed.
        target: a module, whose parameters and buffers are written into; or tensors by name.

    Attributes:
        version: the last one that was loaded; None before the first.
    """

    def __init__(self, objects: VersionedObjects, name: str, target: torch.nn.Module | Mapping[str, Tensor]) -> None:
        check_id(name)
        self._objects, self._name, self._target = objects, name, target
        self.version: int | None = None

    def update(self, timeout: float | None = None, *, waits: bool = True) -> int | None:
        """Load the newest version, all of it or nothing.

        Args:
            timeout: in seconds; None for as long as it takes.
            waits: whether to wait for a version newer than the last one.

        Returns:
            The version that the tensors are now.

        Raises:
            ObjectError: if it does not fit the tensors, or is damaged; without `waits`, also if it is lost.
            ObjectTimeoutError: if no newer one has come in time.
        """
        deadline, why = CallDeadline(timeout), ""
        after = -1 if self.version is None else self.version
        while True:
            newest = self._newest(after, deadline, why, waits=waits)
            if newest <= after:
                if why:
                    raise ObjectError(why)
                return self.version
            why = self._objects.load(self._name, newest, tensors_of(self._target), deadline)
            if not why:
                self.version = newest
                return newest
            after = newest

    def _newest(self, after: int, deadline: CallDeadline, why: str, *, waits: bool) -> int:
        future = self._objects.access.versions(self._name + DESCRIPTION, after, waits=waits)
        future.progress = why or "nobody has published a newer one"
        future.what = f"follow {self._name!r}" + (f" beyond version {after}" if after >= 0 else "")
        try:
            known = future.get(deadline)
        finally:
            future.stop()
        return known.versions[-1] if known.versions else -1


def tensors_of(source: torch.nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a module's state by name, tied ones once, without the prefix of a wrapper; or tensors as they are.

    >>> sorted(tensors_of(torch.nn.Linear(2, 3)))
    ['bias', 'weight']
    """
    if not isinstance(source, torch.nn.Module):
        return source
    state = {name: value for name, value in source.state_dict().items() if isinstance(value, torch.Tensor)}
    if state and all(name.startswith(_WRAPPED) for name in state):
        state = {name.removeprefix(_WRAPPED): value for name, value in state.items()}
    first: dict[object, str] = {}
    for name, value in state.items():
        where = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        first.setdefault(where, name)
    return {name: state[name] for name in first.values()}
