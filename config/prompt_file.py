"""Read and check a file of prompts, whose rows have named columns, as JSON lines or parquet.

All rows are checked before the first use. Later, a row is read when it is needed, so that a file may be larger than the
memory of a process. The file must not change during a run (:mod:`.input_files`).
"""

from __future__ import annotations

import codecs
import os
import re
import string
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .input_files import require_unchanged

SUFFIXES = (".jsonl", ".parquet")
"""Endings of the names of files that can be read."""
PARQUET_PACKAGE = "pyarrow"
"""Package that reads parquet files: the extra ``parquet``."""
_MAX_NAMED_COLUMNS = 12
"""Maximum number of columns that an error message names."""
_TYPES = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object"}
_TEXT = "it must be text or a number"


class PromptFileError(ValueError):
    """The file, or a row of it, cannot be used. The text names the file, the line or row, and the column.

    Args:
        text: What is wrong, and where.
        missing_package: Package that reading the file needs and this Python lacks; empty for any other problem.
    """

    def __init__(self, text: str, missing_package: str = "") -> None:
        super().__init__(text)
        self.missing_package = missing_package


def open_rows(path: Path, prompt: str, required: Sequence[str] = ()) -> Rows:
    """Open a file and check all of its rows.

    Args:
        path: The file; the ending of its name determines the format.
        prompt: Format string over the columns.
        required: Further columns that each row must have.

    Raises:
        PromptFileError: The file cannot be read, has no row, or a row cannot be used.
    """
    columns = prompt_columns(prompt)
    require_unchanged(path)
    try:
        rows = _Parquet(path) if path.suffix == ".parquet" else _JsonLines(path)
    except OSError as error:
        raise PromptFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    for place, row in rows.placed():
        _check_row(place, row, prompt, columns, required)
    if not len(rows):
        raise PromptFileError(f"{path}: has no row")
    return rows


def prompt_columns(prompt: str) -> dict[str, bool]:
    """Return the columns that a format string uses.

    A column is mapped to True if the string uses only a part of the column's value, as in ``{metadata[matrix]}``.
    """
    fields = [field for _, field, _, _ in string.Formatter().parse(prompt) if field is not None]
    return {root(field): root(field) != field for field in fields}


def root(field: str) -> str:
    """Return the column of a field of a format string: ``metadata`` of ``metadata[matrix]``."""
    return re.match(r"[^.\[]*", field).group()  # type: ignore[union-attr]  # it matches any text


def _check_row(place: str, row: Any, prompt: str, columns: dict[str, bool], required: Sequence[str]) -> None:
    if not isinstance(row, dict):
        raise PromptFileError(
            f"{place}: is {_TYPES.get(type(row), 'a single value')}; each line must be an object:"
            ' {"question": "...", "answer": "..."}'
        )
    for column in (*columns, *required):
        if column not in row:
            raise PromptFileError(f'{place}: there is no column "{column}"; this row has {_named(row)}')
        value = row[column]
        if not (columns.get(column) or _is_text(value)):
            raise PromptFileError(
                f'{place}: column "{column}" is {_TYPES.get(type(value), type(value).__name__)}; {_TEXT}'
            )
    try:
        text = prompt.format_map(row)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        wrong = ", ".join(f'"{column}"' for column in columns)
        raise PromptFileError(
            f"{place}: column {wrong} does not fit the prompt {prompt!r} ({type(error).__name__}: {error})"
        ) from None
    if not text.strip():
        raise PromptFileError(f"{place}: the prompt is empty (column {', '.join(f'{name!r}' for name in columns)})")


def _is_text(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _named(row: dict[str, Any]) -> str:
    names = [f'"{name}"' for name in row]
    more = f" and {len(names) - _MAX_NAMED_COLUMNS} more" if len(names) > _MAX_NAMED_COLUMNS else ""
    return f"{', '.join(names[:_MAX_NAMED_COLUMNS])}{more}" if names else "none"


class _JsonLines:
    """A file of JSON lines. Lines without text are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decode = msgspec.json.Decoder().decode
        self._file = path.open("rb")
        self._written_at = os.fstat(self._file.fileno()).st_mtime_ns
        self._starts = array("Q")
        """Position of each row in the file, in bytes."""
        self._ends = array("Q")

    def __len__(self) -> int:
        return len(self._starts)

    def placed(self) -> Iterator[tuple[str, Any]]:
        """Yield (place, value) of each row, and record the row's position in the file.

        The place is ``path:line``, for error messages.
        """
        at = 0
        for number, line in enumerate(self._file, 1):
            start, at = at, at + len(line)
            if line.startswith(codecs.BOM_UTF8):
                start, line = start + len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            place = f"{self._path}:{number}"
            try:
                value = self._decode(line.decode())
            except UnicodeDecodeError:
                text = "is not UTF-8; convert the file, for example: iconv -f LATIN1 -t UTF-8"
                raise PromptFileError(f"{place}: {text}") from None
            except (msgspec.DecodeError, RecursionError) as error:
                raise PromptFileError(f"{place}: not valid JSON: {error}") from None
            self._starts.append(start)
            self._ends.append(at)
            yield place, value

    def row(self, index: int) -> dict[str, Any]:
        """Return a row, numbered from 0: the value of each column by name."""
        start, descriptor = self._starts[index], self._file.fileno()
        line = os.pread(descriptor, self._ends[index] - start, start)
        before, self._written_at = self._written_at, os.fstat(descriptor).st_mtime_ns
        if self._written_at != before:
            require_unchanged(self._path)
        row: dict[str, Any] = self._decode(line)
        return row


class _Parquet:
    """A parquet file, whose columns are mapped or decompressed into memory."""

    def __init__(self, path: Path) -> None:
        try:
            from pyarrow import ArrowException, parquet  # imported here: JSON lines do not need it
        except ModuleNotFoundError:
            text = f"{path}: reading parquet needs {PARQUET_PACKAGE}, which {sys.prefix} lacks"
            raise PromptFileError(f"{text}; pip install {PARQUET_PACKAGE} there", PARQUET_PACKAGE) from None
        self._path = path
        try:
            self._table = parquet.read_table(path, memory_map=True)
        except ArrowException as error:
            raise PromptFileError(f"{path}: is not a parquet file: {str(error).splitlines()[0]}") from None
        self._names = self._table.column_names

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def placed(self) -> Iterator[tuple[str, Any]]:
        """Yield (place, row) of each row.

        The place is ``path: row n``, for error messages. The row maps the name of each column to its value.
        """
        for index in range(len(self)):
            yield f"{self._path}: row {index + 1}", self.row(index)

    def row(self, index: int) -> dict[str, Any]:
        """Return a row, numbered from 0: the value of each column by name."""
        return {name: self._table.column(name)[index].as_py() for name in self._names}


Rows = _JsonLines | _Parquet
"""The rows of a file."""
