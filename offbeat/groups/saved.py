"""Fitted groups as a file: an Arrow table with a row for each group, and in its metadata what the models are.

    with open("sales.models", "rb") as file:
        table = pyarrow.ipc.open_stream(file).read_all()

After the table come 16 bytes, the xxh3 of all before, so no damaged file is read. No code is in it: a spec is stored by
its name and numbers, so one that holds a function is given again when it is read.
"""

from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from offbeat.groups.fitting import has_model, no_models
from offbeat.groups.glm import Linear, Logistic, Poisson
from offbeat.groups.group_index import GroupIndex
from offbeat.groups.records import GroupModels, GroupRecords, ParentLevel
from offbeat.groups.search import Grid, LogUniform, Uniform
from offbeat.groups.table_input import GroupDataError
from offbeat.groups.trees import Trees
from offbeat.safe_read import UnreadableError, decode
from offbeat.safe_write import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.groups.fitting import GroupModel

_FORMAT, _SEAL_BYTES = 2, 16
_METADATA, _PARENTS = b"offbeat groups", b"offbeat parents %d"
_SPECS = {spec.__name__: spec for spec in (Linear, Logistic, Poisson, Trees)}
_NUMBERS = [field.name for field in dataclasses.fields(GroupRecords) if field.name != "fallback"]


_Value = bool | int | float | str
_RANGES = {spec.__name__: spec for spec in (Uniform, LogUniform)}


class SavedSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata of fitted groups.

    Args:
        format: of the file.
        model: the name of the spec.
        settings: its fields, a list for a `Grid`, a name and two numbers for a range; None where it holds what is no
            number.
        tried: as in `GroupModels`.
        fallback: the model of all rows, if there is one.
    """

    format: int
    model: str
    settings: dict[str, _Value | list[_Value | None] | dict[str, list[float]] | None] | None
    by: list[str]
    features: list[str]
    target: str
    is_classifier: bool
    fallback: list[float | str] | None
    tried: dict[str, list[_Value | None]]


def save(fitted: GroupModels, path: Path) -> None:
    """Write fitted groups to a file.

    Raises:
        GroupDataError: if models are objects of another library, which no file without code can hold.
        OSError: if it cannot be written; a file that was there is as before.
    """
    _check_texts(fitted)
    index, records = fitted.index, fitted.records
    table = _keyed(index, {name: getattr(records, name) for name in _NUMBERS})
    spec = SavedSpec(
        format=_FORMAT,
        model=type(fitted.model).__name__,
        settings=_settings(fitted.model),
        by=index.by,
        features=fitted.features,
        target=fitted.target,
        is_classifier=fitted.classes is not None,
        fallback=records.fallback.tolist() if has_model(records.fallback) else None,
        tried=fitted.tried,
    )
    metadata = {_METADATA: msgspec.json.encode(spec)}
    if fitted.classes is not None:
        metadata[b"offbeat classes"] = _as_stream(pa.table({"class": fitted.classes}))
    for columns, level in enumerate(fitted.parents, 1):
        metadata[_PARENTS % columns] = _as_stream(_keyed(level.index, {"coefficients": level.coefficients}))
    made = _as_stream(table.replace_schema_metadata(metadata))
    write_whole(path, made + xxhash.xxh3_128_digest(made))


def load(path: Path, model: GroupModel | None = None) -> GroupModels:
    """Read fitted groups from a file.

    Args:
        path: of the file.
        model: the spec; None where the file says it, as for linear models and trees.

    Raises:
        GroupDataError: if the file cannot be read, is damaged, or does not say its spec.
    """
    try:
        content = path.read_bytes()
        if xxhash.xxh3_128_digest(content[:-_SEAL_BYTES]) != content[-_SEAL_BYTES:]:
            raise GroupDataError(f"Cannot read {path}: it holds no groups that offbeat has fitted, or is damaged.")
        table = pa.ipc.open_stream(content[:-_SEAL_BYTES]).read_all()
        spec = decode(msgspec.json.Decoder(SavedSpec).decode, (table.schema.metadata or {}).get(_METADATA, b""))
        if spec.format != _FORMAT:
            raise GroupDataError(f"Cannot read {path}: it has format {spec.format}, written by another version.")
        classes = None
        if spec.is_classifier:
            classes = pa.ipc.open_stream(table.schema.metadata[b"offbeat classes"]).read_all()["class"].combine_chunks()
        numbers = {name: _matrix(table[name]) for name in _NUMBERS}
        models = numbers["coefficients"]
        fallback = no_models(models.shape[1:], str if models.dtype == object else float)
        if spec.fallback is not None:
            fallback[:] = spec.fallback
        records = GroupRecords(**numbers, fallback=fallback)
        index = _index(table, spec.by)
        streams = [(at, table.schema.metadata.get(_PARENTS % at)) for at in range(1, len(spec.by))]
        levels = [(at, pa.ipc.open_stream(stream).read_all()) for at, stream in streams if stream is not None]
        parents = [ParentLevel(_index(level, spec.by[:at]), _matrix(level["coefficients"])) for at, level in levels]
    except OSError as error:
        raise GroupDataError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (UnreadableError, KeyError, TypeError) as error:
        raise GroupDataError(f"Cannot read {path}: its metadata are of another version.") from error
    made = model if model is not None else _spec(spec, path)
    return GroupModels(made, index, records, spec.features, spec.target, classes, spec.tried, tuple(parents))


def _keyed(index: GroupIndex, arrays: dict[str, np.ndarray]) -> pa.Table:
    """A table of groups: keys, rows, and arrays of (groups,) or (groups, n)."""
    columns = {f"key {at}": index.keys[name] for at, name in enumerate(index.by)}
    columns["rows"] = pa.chunked_array([pa.array(index.rows)])
    for name, values in arrays.items():
        flat = pa.array(values.ravel(), pa.large_string() if values.dtype == object else None)
        columns[name] = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.table(columns)


def _index(table: pa.Table, by: list[str]) -> GroupIndex:
    """The groups of a table that `_keyed` has made."""
    return GroupIndex(pa.table({name: table[f"key {at}"] for at, name in enumerate(by)}), table["rows"].to_numpy())


def _check_texts(fitted: GroupModels) -> None:
    """Refuse models that are neither numbers nor texts."""
    records = fitted.records
    models = [records.coefficients, records.fallback, *(level.coefficients for level in fitted.parents)]
    of_objects = [one for part in models for one in part.flat] if models[0].dtype == object else []
    if not all(isinstance(value, str | None) for value in of_objects):
        raise GroupDataError(
            f"Cannot save the models of {type(fitted.model).__name__}: they are objects of another library, and this "
            "file holds no code. Keep what `fit` has returned by joblib.dump, which reads it by running code, or fit "
            "Linear, Logistic, Poisson or Trees."
        )


def _settings(model: GroupModel) -> dict[str, Any] | None:
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}  # type: ignore[arg-type]
    plain = {name: _as_plain(value) for name, value in values.items()}
    is_plain = all(isinstance(one, _Value | dict | None) for value in plain.values() for one in _list(value))
    return plain if is_plain else None


def _as_plain(value: Any) -> Any:
    if isinstance(value, Uniform | LogUniform):
        return {type(value).__name__: [value.low, value.high]}
    return list(value.values) if isinstance(value, Grid) else value


def _of_plain(value: Any) -> Any:
    if isinstance(value, dict):
        ((name, ends),) = value.items()
        return _RANGES[name](*ends)
    return Grid(*value) if isinstance(value, list) else value


def _spec(spec: SavedSpec, path: Path) -> GroupModel:
    if spec.settings is None or spec.model not in _SPECS:
        raise GroupDataError(
            f"Cannot read {path} by itself: name its spec, FittedGroups.load(path, {spec.model}(...))."
        )
    values = {name: _of_plain(value) for name, value in spec.settings.items()}
    return _SPECS[spec.model](**values)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    """The values of a column, writable; a list in each row makes a matrix."""
    whole = column.combine_chunks()
    if not pa.types.is_fixed_size_list(column.type):
        return np.array(whole.to_numpy(zero_copy_only=False))
    return np.array(whole.flatten().to_numpy(zero_copy_only=False)).reshape(len(column), column.type.list_size)


def _as_stream(table: pa.Table) -> bytes:
    made = io.BytesIO()
    with pa.ipc.new_stream(made, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return made.getvalue()
