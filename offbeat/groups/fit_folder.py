"""A folder in which a fit leaves what it has fitted, bucket by bucket, and finds it after it was ended.

`fit.txt` says what is fitted: columns, keys and how many rows each has, how groups are put into buckets, and the spec.
Rows are not compared, but for how many there are: whoever changes values has to name another folder. A file of a
bucket holds numbers and texts alone, and is written whole or not at all.
"""

from __future__ import annotations

import io
import logging
import zipfile
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_128

from offbeat.groups.fit_description import description_of, difference
from offbeat.groups.table_input import GroupDataError
from offbeat.safe_write import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.groups.group_index import GroupIndex
    from offbeat.groups.group_job import GroupJob
    from offbeat.groups.records import GroupRecords

_log = logging.getLogger("offbeat")


class FitFolder:
    """The folder of one fit.

    Args:
        path: of the folder, which is made if it is not there.
        buckets: (groups,), the bucket of each.

    Raises:
        GroupDataError: if the folder is of another fit, or cannot be used, or models are neither numbers nor texts.
    """

    def __init__(self, path: Path, job: GroupJob, index: GroupIndex, buckets: np.ndarray) -> None:
        if job.model.dtype is object:
            raise GroupDataError(
                f"Cannot leave models of {type(job.model).__name__} in {path}: they are objects of "
                "another library. Fit without folder."
            )
        self._path, self._buckets = path, buckets
        said = f"{_described(job, index, buckets)}\n"
        place = path / "fit.txt"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                if any(one.suffix != ".part" for one in path.iterdir()):
                    raise GroupDataError(f"Cannot resume in {path}: it holds other things. Name an empty folder.")
                write_whole(place, said.encode())
            told = place.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise GroupDataError(f"Cannot resume in {path}: {error}.") from error
        if told != said:
            other = difference(said, told) or "text"
            raise GroupDataError(
                f"Cannot resume in {path}: it is of another fit (other {other}). Name another folder, or remove "
                "this one."
            )

    def read(self) -> dict[int, tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Return the numbers of groups and their records, by bucket; a damaged file counts as if it were not there."""
        found = {}
        for path in sorted(self._path.glob("*.npz")):
            try:
                bucket = int(path.stem)
                with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                    part = {name: file[name] for name in file.files}
                numbers = part.pop("numbers")
                if not np.array_equal(numbers, np.flatnonzero(self._buckets == bucket)):
                    raise ValueError("it is of other groups")
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                _log.warning("Fitting a bucket again: cannot read %s (%s).", path, error)
                continue
            found[bucket] = numbers, part
        return found

    def write(self, bucket: int, numbers: np.ndarray, records: GroupRecords) -> None:
        """Leave the records of a bucket's groups.

        Raises:
            GroupDataError: if the disk is full.
        """
        made = io.BytesIO()
        np.savez(made, allow_pickle=False, numbers=numbers, **records.of(numbers))
        try:
            write_whole(self._path / f"{bucket:06d}.npz", made.getvalue())
        except OSError as error:
            raise GroupDataError(f"Cannot leave what was fitted in {self._path}: {error.strerror or error}.") from error


def _described(job: GroupJob, index: GroupIndex, buckets: np.ndarray) -> str:
    digest = xxh3_128()
    for values in (index.hashes, index.rows, buckets):
        digest.update(values.tobytes())
    groups = f"groups: {len(index)} of {int(index.rows.sum())} rows, {digest.hexdigest()}"
    return f"{description_of(job)}\n{groups}"
