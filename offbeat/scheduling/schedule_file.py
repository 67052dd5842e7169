"""A schedule and the profile that it was made from, as bytes: what a run leaves in its folder for people to look at."""

from __future__ import annotations

import msgspec

from offbeat import safe_read
from offbeat.scheduling.profile import BackwardProfile
from offbeat.scheduling.schedule import Schedule

_VERSION = 1


class MadeSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that workers go by.

    Args:
        step: behind which it was made.
        scheduler: that made it, as Python.
        why: it was made anew; "" for the first.
        profile: that it was made from.
    """

    version: int = _VERSION
    step: int
    scheduler: str
    why: str = ""
    profile: BackwardProfile
    schedule: Schedule

    def to_bytes(self) -> bytes:
        """The same as JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def file_name(model: int) -> str:
        """The name of the file in a run's folder, of the first model that was prepared (0), or a later one.

        >>> MadeSchedule.file_name(0), MadeSchedule.file_name(1)
        ('schedule.json', 'schedule-2.json')
        """
        return f"schedule-{model + 1}.json" if model else "schedule.json"

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview | str) -> MadeSchedule:
        """Read what `to_bytes` has made; the `decoder` of `safe_read`.

        Raises:
            UnreadableError: if it is damaged, or of another version.
        """
        made = safe_read.decode(_decode, data)
        gradients = made.profile.gradients
        trouble = made.profile.trouble or made.schedule.trouble([one.numel for one in gradients])
        if not gradients or any(one.numel < 0 or one.itemsize < 1 for one in gradients):
            trouble = "it has no gradients, or one without a size"
        if made.version != _VERSION:
            trouble = f"it is of version {made.version}, and this offbeat reads version {_VERSION}"
        if trouble:
            raise safe_read.UnreadableError(trouble)
        return made


_decode = msgspec.json.Decoder(MadeSchedule).decode
