"""Asking one GPU: every value stands alone, and one that does not come leaves a reason under its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .names import CANNOT, FUNCTION_NOT_FOUND, GONE, SESSION_OVER, SUCCESS, UNKNOWN, in_words

Way = Callable[[Any, Any], Any]
"""(nvidia-ml-py, handle) → value; raises NVMLError"""

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""of nvmlValue_t, by nvmlValueType_t"""
_OF_UNKNOWN_TYPE = -1
_GARBLED = -2
"""our own codes: a value of a type that we do not know; a text that is no text (a corrupted infoROM)"""


class SessionOver(Exception):
    """The driver was unloaded or replaced: open NVML anew."""


class Ask(NamedTuple):
    """``fields``: the values' names; of more than one, a way gives a tuple. ``ways``: tried in this order, as long as
    the driver says that it cannot do that one."""

    fields: tuple[str, ...]
    ways: tuple[Way, ...]


class FieldAsk(NamedTuple):
    """One of nvmlDeviceGetFieldValues, many of which make one call. ``ways``: where the driver has no such field."""

    field: str
    number: int
    """NVML_FI_DEV_*"""
    convert: Callable[[int], Any] = int
    ways: tuple[Way, ...] = ()


class Answers:
    """What one GPU has said so far. Values stay until they are asked for again."""

    def __init__(self, nvml: Any, handle: Any, may_end: bool = True) -> None:
        self.values: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        self.gone = ""
        """the driver's word that this GPU is lost"""
        self._nvml = nvml
        self._handle = handle
        self._answered = 0
        self._unknown = 0
        self.may_end = may_end
        """an error that says that the session is over ends it; else it is an error as others are"""

    def begin(self) -> None:
        self._answered = self._unknown = 0

    def judge_silence(self) -> None:
        """Nothing that was asked since :meth:`begin` was answered, and somebody said Unknown Error: so does a GPU that
        fell off the bus, with some drivers. One odd function alone condemns no GPU."""
        if self._unknown and not self._answered:
            self.gone = in_words(UNKNOWN)

    def ask(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self._put(ask.fields, *self._first_way(ask.ways))
            if self.gone:
                return

    def ask_fields(self, asks: Sequence[FieldAsk]) -> None:
        """One call for all of them."""
        for ask, (code, number) in zip(asks, self.field_values([(ask.number, 0) for ask in asks]), strict=True):
            if code == SUCCESS:
                self._put((ask.field,), code, ask.convert(number))
            elif code in CANNOT and ask.ways:
                self._put((ask.field,), *self._first_way(ask.ways))
            else:
                self._put((ask.field,), code, None)
            if self.gone:
                return

    def field_values(self, wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """(error code, number) of each (field, scope)."""
        try:
            found = self._nvml.nvmlDeviceGetFieldValues(self._handle, wanted)
        except self._nvml.NVMLError as error:
            return [(int(error.value), 0)] * len(wanted)
        return [_number(value) for value in found]

    def call(self, way: Way) -> tuple[int, Any]:
        """(error code, value)"""
        try:
            return SUCCESS, way(self._nvml, self._handle)
        except self._nvml.NVMLError as error:
            return int(error.value), None
        except AttributeError:  # an older nvidia-ml-py
            return FUNCTION_NOT_FOUND, None
        except UnicodeDecodeError:
            return _GARBLED, None

    def note(self, field: str, code: int) -> None:
        """Why a field, or a part of it, was not read."""
        self._heed(code)
        self.unread[field] = self.words(code)

    def words(self, code: int) -> str:
        if code in (_OF_UNKNOWN_TYPE, _GARBLED):
            return "of an unknown type" if code == _OF_UNKNOWN_TYPE else "not a text"
        return in_words(code, str(self._nvml.NVMLError(code)))

    def _first_way(self, ways: Sequence[Way]) -> tuple[int, Any]:
        why = FUNCTION_NOT_FOUND
        for way in ways:
            code, value = self.call(way)
            if code == SUCCESS:
                return code, value
            if why == FUNCTION_NOT_FOUND:  # says least
                why = code
            if code not in CANNOT:
                return code, None
        return why, None

    def _put(self, fields: tuple[str, ...], code: int, value: Any) -> None:
        if code == SUCCESS:
            self._answered += 1
            self.values.update(zip(fields, value, strict=True) if len(fields) > 1 else ((fields[0], value),))
            if self.unread:
                for field in fields:
                    self.unread.pop(field, None)
            return
        self._heed(code)
        words = self.words(code)
        for field in fields:
            self.values[field] = None
            self.unread[field] = words

    def _heed(self, code: int) -> None:
        if code in SESSION_OVER and self.may_end:
            raise SessionOver(in_words(code))
        if code in GONE:
            self.gone = in_words(code)
        self._unknown += code == UNKNOWN


def _number(value: Any) -> tuple[int, int]:
    if value.nvmlReturn != SUCCESS:
        return int(value.nvmlReturn), 0
    kind = int(value.valueType)
    return (SUCCESS, int(getattr(value.value, _MEMBERS[kind]))) if kind < len(_MEMBERS) else (_OF_UNKNOWN_TYPE, 0)
