"""Prediction of the rows of a Ray dataset with a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attnforge.arrays import BFLOAT16, Array, without_bfloat16
from attnforge.bundle import DimSpec, TensorSpec
from attnforge.errors import InputError, UsageError, check_known
from attnforge.serving.batching import Runs, leading_dim, why_not_apart
from attnforge.serving.ray.handle import Handle
from attnforge.serving.ray.metrics import observed


class Predictor:
    """A callable class for `Dataset.map_batches` that adds the bundle's outputs as columns.

    Every actor loads the bundle once. A row is a sample if one dim leads all inputs and outputs and samples are
    independent, which two runs check when the actor starts; otherwise a row contains whole inputs.

    - A batch with more rows than the bundle takes is split into several calls; one with fewer is padded with copies of
      its last row, whose outputs are dropped. With `samples` all calls have that size.
    - Rows of different sizes in one batch are run in one call per size.
    - Arrow has no bfloat16: such inputs are read from float32 columns, and such outputs are float32.

    Args:
        handle: the bundle.
        columns: the column of each input; by default the one of the same name.
        outputs: the column of each output; by default one of the same name.
        keep: the columns to keep; by default all.
        samples: rows per call, for results that do not depend on how Ray splits batches, and for backends that prepare
            for every size; by default the rows that Ray passes, within what the bundle takes.

    Raises:
        AttnforgeError: the bundle cannot be opened; see :meth:`Handle.open`.
        UsageError: no such input or output, two outputs of one name, or `samples` that the bundle does not take.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        columns: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        keep: Sequence[str] | None = None,
        samples: int | None = None,
    ) -> None:
        session = handle.open()
        manifest = session.bundle.manifest
        self._columns = _names("input", manifest.inputs, columns)
        self._outputs = _names("output", manifest.outputs, outputs)
        if len({*self._outputs.values()}) < len(self._outputs):
            raise UsageError(f"two outputs would be one column: {self._outputs}; give each a different name")
        self._keep = None if keep is None else list(keep)
        batch = leading_dim(manifest)
        together = batch if isinstance(batch, str) else why_not_apart(session, batch) or batch
        self._run = _runner(observed(session), together, samples)
        self._inputs, self._whole_because = manifest.inputs, together if isinstance(together, str) else None

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        """Return the kept columns and the outputs.

        Args:
            batch: columns by name, each an array whose first dim counts the rows.

        Raises:
            InputError: a column is missing, or rows are invalid inputs.
            UsageError: an output would replace a column.
        """
        keep = list(batch) if self._keep is None else self._keep
        for name in keep:
            _check_column(name, batch, "which is to be kept, ")
        if taken := [name for name in self._outputs.values() if name in keep]:
            raise UsageError(
                f"output column {taken[0]!r} would replace an input column; rename it (outputs=…), or do not keep the "
                "input column (keep=…)"
            )
        rows = {spec.name: self._column(batch, spec) for spec in self._inputs}
        try:
            results = self._run(rows)
        except InputError as error:
            if self._whole_because is None:
                raise
            raise InputError(f"{error}; every row contains whole inputs, because {self._whole_because}") from error
        named = {self._outputs[name]: _each(without_bfloat16, column) for name, column in results.items()}
        return {name: batch[name] for name in keep} | named

    def _column(self, batch: Mapping[str, Array], spec: TensorSpec) -> Array:
        """Return the column of an input: an array of rows, or an array of objects if rows differ in size."""
        name = self._columns[spec.name]
        _check_column(name, batch, f"from which input {spec.name!r} is read, ")
        column = np.asarray(batch[name])
        if spec.dtype != BFLOAT16.name:
            return column
        return _each(lambda row: row.astype(BFLOAT16) if row.dtype == np.float32 else row, column)


def _names(kind: str, specs: Sequence[TensorSpec], given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the column of every input or output."""
    known = [spec.name for spec in specs]
    for name in given or {}:
        check_known(kind, name, known)
    return {name: (given or {}).get(name, name) for name in known}


def _check_column(name: str, batch: Mapping[str, Array], what: str) -> None:
    if name not in batch:
        raise InputError(f"column {name!r}, {what}is missing; the rows have {', '.join(batch)}")


# --- calls ------------------------------------------------------------------------------------------------------------

Columns = dict[str, Array]


def _runner(session: Runs, batch: DimSpec | str, samples: int | None) -> Callable[[Columns], Columns]:
    """Return the function that runs rows.

    Args:
        session: session of the model.
        batch: the dim that counts samples, or why there is none.
        samples: samples per call.
    """
    if isinstance(batch, str):
        if samples is not None:
            raise UsageError(
                f"{samples} samples per call were asked for, but calls have no samples: {batch}; omit samples"
            )
        return lambda rows: _by_row(session, rows)
    least, most = session.inputs[0].range_of(0)
    if samples is not None and not least <= samples <= most:
        raise UsageError(f"{samples} samples per call were asked for; the bundle takes {least} to {most}")
    least, most = (least, most) if samples is None else (samples, samples)
    return lambda rows: _by_size(session, rows, least, most)


def _by_row(session: Runs, rows: Columns) -> Columns:
    """Run every row in its own call."""
    count = len(next(iter(rows.values())))
    results = [session.run({name: np.asarray(column[i]) for name, column in rows.items()}) for i in range(count)]
    return {spec.name: _together([result[spec.name] for result in results], spec) for spec in session.outputs}


def _by_size(session: Runs, rows: Columns, least: int, most: int) -> Columns:
    """Run rows of equal sizes together, in calls of `least` to `most` samples."""
    if not any(column.dtype == object for column in rows.values()):
        return _in_calls(session, rows, least, most)
    ragged = {name: [np.asarray(row) for row in column] for name, column in rows.items()}
    indices: dict[object, list[int]] = {}
    for index, row in enumerate(zip(*ragged.values(), strict=True)):
        indices.setdefault(tuple((array.shape, array.dtype) for array in row), []).append(index)
    results: dict[str, dict[int, Array]] = {spec.name: {} for spec in session.outputs}
    for alike in indices.values():
        stacked = {name: np.stack([column[index] for index in alike]) for name, column in ragged.items()}
        for name, column in _in_calls(session, stacked, least, most).items():
            results[name].update(zip(alike, column, strict=True))
    count = sum(map(len, indices.values()))
    return {spec.name: _together([results[spec.name][i] for i in range(count)], spec) for spec in session.outputs}


def _in_calls(session: Runs, rows: Columns, least: int, most: int) -> Columns:
    count = len(next(iter(rows.values())))
    parts = []
    for start in range(0, count, most):
        part = {name: _filled(column[start : start + most], least) for name, column in rows.items()}
        size = min(most, count - start)
        parts.append({name: array[:size] for name, array in session.run(part).items()})
    if not parts:
        return {spec.name: _together([], spec) for spec in session.outputs}
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]


def _filled(column: Array, least: int) -> Array:
    missing = least - len(column)
    return column if missing <= 0 else np.concatenate([column, np.repeat(column[-1:], missing, 0)])


# --- columns ----------------------------------------------------------------------------------------------------------


def _together(arrays: Sequence[Array], spec: TensorSpec) -> Array:
    """Return rows as a column: one array if they have one shape, otherwise an array of objects."""
    if not arrays:
        sizes = [dim if isinstance(dim, int) else 0 for dim in spec.dims[1:]]
        return np.empty((0, *sizes), BFLOAT16 if spec.dtype == BFLOAT16.name else spec.dtype)
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    return np.fromiter(arrays, object, len(arrays))


def _each(change: Callable[[Any], Array], column: Array) -> Array:
    if column.dtype != object:
        return change(column)
    return np.fromiter((change(np.asarray(row)) for row in column), object, len(column))
