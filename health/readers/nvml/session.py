"""Asking one GPU: every value stands alone, and one that does not come leaves a reason under its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .names import FUNCTION_NOT_FOUND, LOST_CODES, SESSION_OVER_CODES, SUCCESS, UNKNOWN, UNSUPPORTED_CODES, error_text

QueryFunction = Callable[[Any, Any], Any]
"""(nvidia-ml-py, handle) → value; raises NVMLError"""

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""of nvmlValue_t, by nvmlValueType_t"""
_UNKNOWN_TYPE = -1
_GARBLED = -2
"""our own codes: a value of a type that we do not know; a text that is no text (a corrupted infoROM)"""


class SessionOver(Exception):
    """The driver was unloaded or replaced: open NVML anew."""


class Query(NamedTuple):
    """``fields``: the values' names; of more than one, a way gives a tuple. ``ways``: tried in this order, as long as
    the driver says that it cannot do that one."""

    fields: tuple[str, ...]
    alternatives: tuple[QueryFunction, ...]


class FieldQuery(NamedTuple):
    """One of nvmlDeviceGetFieldValues, many of which make one call. ``ways``: where the driver has no such field."""

    field: str
    number: int
    """NVML_FI_DEV_*"""
    convert: Callable[[int], Any] = int
    alternatives: tuple[QueryFunction, ...] = ()


class QueryResults:
    """What one GPU has said so far. Values stay until they are asked for again."""

    def __init__(self, nvml: Any, handle: Any, session_may_end: bool = True) -> None:
        self.values: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        self.lost_reason = ""
        """the driver's word that this GPU is lost"""
        self._nvml = nvml
        self._handle = handle
        self._answered = 0
        self._unknown_errors = 0
        self.session_may_end = session_may_end
        """an error that says that the session is over ends it; else it is an error as others are"""

    def begin_read(self) -> None:
        self._answered = self._unknown_errors = 0

    def detect_unresponsive(self) -> None:
        """Nothing that was asked since :meth:`begin` was answered, and somebody said Unknown Error: so does a GPU that
        fell off the bus, with some drivers. One odd function alone condemns no GPU."""
        if self._unknown_errors and not self._answered:
            self.lost_reason = error_text(UNKNOWN)

    def query(self, queries: Sequence[Query]) -> None:
        for item in queries:
            self._store(item.fields, *self._first_supported(item.alternatives))
            if self.lost_reason:
                return

    def query_fields(self, queries: Sequence[FieldQuery]) -> None:
        """One call for all of them."""
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
        """(error code, number) of each (field, scope)."""
        try:
            found = self._nvml.nvmlDeviceGetFieldValues(self._handle, wanted)
        except self._nvml.NVMLError as error:
            return [(int(error.value), 0)] * len(wanted)
        return [_number(value) for value in found]

    def call(self, function: QueryFunction) -> tuple[int, Any]:
        """(error code, value)"""
        try:
            return SUCCESS, function(self._nvml, self._handle)
        except self._nvml.NVMLError as error:
            return int(error.value), None
        except AttributeError:  # an older nvidia-ml-py
            return FUNCTION_NOT_FOUND, None
        except UnicodeDecodeError:
            return _GARBLED, None

    def note(self, field: str, code: int) -> None:
        """Why a field, or a part of it, was not read."""
        self._check_error(code)
        self.unread[field] = self.describe(code)

    def describe(self, code: int) -> str:
        if code in (_UNKNOWN_TYPE, _GARBLED):
            return "of an unknown type" if code == _UNKNOWN_TYPE else "not a text"
        return error_text(code, str(self._nvml.NVMLError(code)))

    def _first_supported(self, alternatives: Sequence[QueryFunction]) -> tuple[int, Any]:
        why = FUNCTION_NOT_FOUND
        for function in alternatives:
            code, value = self.call(function)
            if code == SUCCESS:
                return code, value
            if why == FUNCTION_NOT_FOUND:  # says least
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
