"""Queries of one GPU. For each value that cannot be read, the reason is stored; other values are not affected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .names import FUNCTION_NOT_FOUND, LOST_CODES, SESSION_OVER_CODES, SUCCESS, UNKNOWN, UNSUPPORTED_CODES, error_text

QueryFunction = Callable[[Any, Any], Any]
"""(nvidia-ml-py, handle) → value; raises NVMLError."""

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Names of the members of nvmlValue_t, indexed by nvmlValueType_t."""
_UNKNOWN_TYPE = -1
"""Error code that this module adds to the codes of NVML: the value has an unknown type."""
_GARBLED = -2
"""Error code that this module adds: the text of the value cannot be decoded (the infoROM is corrupted)."""


class SessionOver(Exception):
    """The driver was unloaded or replaced: NVML must be reopened."""


class Query(NamedTuple):
    """Query of one or more values.

    ``fields`` are the values' names. ``alternatives`` are functions that are tried in order until the driver supports
    one of them. If there are several values, each function returns a tuple.
    """

    fields: tuple[str, ...]
    alternatives: tuple[QueryFunction, ...]


class FieldQuery(NamedTuple):
    """Query of one field of nvmlDeviceGetFieldValues, which reads many fields in one call.

    ``alternatives`` are tried if the driver does not have the field.
    """

    field: str
    number: int
    """Number of the field: NVML_FI_DEV_*."""
    convert: Callable[[int], Any] = int
    alternatives: tuple[QueryFunction, ...] = ()


class QueryResults:
    """The values read from one GPU so far. A value stays until it is queried again."""

    def __init__(self, nvml: Any, handle: Any, session_may_end: bool = True) -> None:
        self.values: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        self.lost_reason = ""
        """Driver's error text if this GPU is lost; else empty."""
        self._nvml = nvml
        self._handle = handle
        self._answered = 0
        self._unknown_errors = 0
        self.session_may_end = session_may_end
        """Whether an error that ends the session is raised as SessionOver; if not, it is noted like any other error."""

    def begin_read(self) -> None:
        """Start a new read: no query counts as answered yet."""
        self._answered = self._unknown_errors = 0

    def detect_unresponsive(self) -> None:
        """Mark the GPU as lost if no query since `begin_read` was answered and at least one failed with Unknown Error.

        With some drivers, all queries of a GPU that fell off the bus fail with this error. If any query was answered,
        failed queries do not suffice.
        """
        if self._unknown_errors and not self._answered:
            self.lost_reason = error_text(UNKNOWN)

    def query(self, queries: Sequence[Query]) -> None:
        """Run the queries and store their results; stop if the GPU is lost."""
        for item in queries:
            self._store(item.fields, *self._first_supported(item.alternatives))
            if self.lost_reason:
                return

    def query_fields(self, queries: Sequence[FieldQuery]) -> None:
        """Run the field queries in one call and store their results; stop if the GPU is lost."""
        for item, (code, number) in zip(
            queries, self.field_values([(item.number, 0) for item in queries]), strict=True
        ):
            if code == SUCCESS:
                self._store((item.field,), code, item.convert(number))
            elif code in UNSUPPORTED_CODES and item.alternatives:
                self._store((item.field,), *self._first_supported(item.alternatives))
            else:
                self._store((item.field,), code, None)
            if self.lost_reason:
                return

    def field_values(self, wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (error code, number) for each (field, scope)."""
        try:
            found = self._nvml.nvmlDeviceGetFieldValues(self._handle, wanted)
        except self._nvml.NVMLError as error:
            return [(int(error.value), 0)] * len(wanted)
        return [_number(value) for value in found]

    def call(self, function: QueryFunction) -> tuple[int, Any]:
        """Call a function of NVML and return (error code, value)."""
        try:
            return SUCCESS, function(self._nvml, self._handle)
        except self._nvml.NVMLError as error:
            return int(error.value), None
        except AttributeError:  # an older nvidia-ml-py
            return FUNCTION_NOT_FOUND, None
        except UnicodeDecodeError:
            return _GARBLED, None

    def note(self, field: str, code: int) -> None:
        """Store the reason why a field, or a part of it, could not be read."""
        self._check_error(code)
        self.unread[field] = self.describe(code)

    def describe(self, code: int) -> str:
        """Return the text for an error code, which is either one of NVML's or one that this module defines."""
        if code in (_UNKNOWN_TYPE, _GARBLED):
            return "its value has an unknown type" if code == _UNKNOWN_TYPE else "its value is not a valid text"
        return error_text(code, str(self._nvml.NVMLError(code)))

    def _first_supported(self, alternatives: Sequence[QueryFunction]) -> tuple[int, Any]:
        why = FUNCTION_NOT_FOUND
        for function in alternatives:
            code, value = self.call(function)
            if code == SUCCESS:
                return code, value
            if why == FUNCTION_NOT_FOUND:  # any other reason is more specific
                why = code
            if code not in UNSUPPORTED_CODES:
                return code, None
        return why, None

    def _store(self, fields: tuple[str, ...], code: int, value: Any) -> None:
        if code == SUCCESS:
            self._answered += 1
            self.values.update(zip(fields, value, strict=True) if len(fields) > 1 else ((fields[0], value),))
            if self.unread:
                for field in fields:
                    self.unread.pop(field, None)
            return
        self._check_error(code)
        text = self.describe(code)
        for field in fields:
            self.values[field] = None
            self.unread[field] = text

    def _check_error(self, code: int) -> None:
        if code in SESSION_OVER_CODES and self.session_may_end:
            raise SessionOver(error_text(code))
        if code in LOST_CODES:
            self.lost_reason = error_text(code)
        self._unknown_errors += code == UNKNOWN


def _number(value: Any) -> tuple[int, int]:
    if value.nvmlReturn != SUCCESS:
        return int(value.nvmlReturn), 0
    kind = int(value.valueType)
    return (SUCCESS, int(getattr(value.value, _MEMBERS[kind]))) if kind < len(_MEMBERS) else (_UNKNOWN_TYPE, 0)
