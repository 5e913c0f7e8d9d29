"""Tables of the state: immutable mappings of which a changed copy costs the same, however large they are.

A run of 8,192 ranks records one event for each rank when its trainer restarts. Each event has a state of its own, so a
plain dict would be copied as a whole for each of them.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Generic, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_GONE: Any = object()
"""Value of a key that was removed."""


class _Log(Generic[K, V]):
    """The changes of a dict that all tables with this dict share: for each key its values, each with its number."""

    __slots__ = ("count", "values")

    def __init__(self) -> None:
        self.count = 0
        self.values: dict[K, list[tuple[int, V]]] = {}


class Table(Mapping[K, V]):
    """A dict as it was after the first ``count`` changes of a log, whatever was added to the log since.

    The order is that of a dict with the same history. A view of all items merges the changes once, and keeps the result
    in their place; this is safe while other threads read the table.
    """

    __slots__ = ("_base", "_count", "_log")

    def __init__(self, base: dict[K, V], log: _Log[K, V], count: int = 0) -> None:
        self._base, self._log, self._count = base, log, count

    def merged(self) -> dict[K, V]:
        """Return the whole table, which the caller must not change."""
        log = self._log
        if self._count and log.values:
            base = dict(self._base)
            for key in list(log.values):  # another thread may add to the log
                value = self.get(key, _GONE)
                if value is not _GONE:
                    base[key] = value
                else:
                    base.pop(key, None)
            self._base, self._log = base, _Log()  # in this order: the log may say again what the dict has
        return self._base

    def __getitem__(self, key: K) -> V:
        value = self.get(key, _GONE)
        if value is _GONE:
            raise KeyError(key)
        return value

    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, /, default: V | D) -> V | D: ...
    def get(self, key: K, /, default: Any = None) -> Any:
        """Return the value of a key, or the default."""
        for number, value in reversed(self._log.values.get(key, ())):
            if number <= self._count:
                return default if value is _GONE else value
        return self._base.get(key, default)

    def __contains__(self, key: object) -> bool:
        return self.get(key, _GONE) is not _GONE  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[K]:
        return iter(self.merged())

    def __len__(self) -> int:
        return len(self.merged())

    def keys(self) -> KeysView[K]:
        """Return a view of the keys, in order."""
        return self.merged().keys()

    def values(self) -> ValuesView[V]:
        """Return a view of the values, in order."""
        return self.merged().values()

    def items(self) -> ItemsView[K, V]:
        """Return a view of the items, in order."""
        return self.merged().items()

    def __repr__(self) -> str:
        return repr(self.merged())

    def changed(self, key: K, value: V) -> Table[K, V]:
        """Return the table with another value of this key.

        It shares dict and log with this table, unless the log has a later change already or has grown as large as the
        dict. A key that returns comes last, as in a dict.
        """
        base, log = self._base, self._log
        values = log.values.get(key)
        if self._count != log.count or log.count > len(base) or (values and values[-1][1] is _GONE):
            base, log = self.merged(), _Log()
        log.count += 1
        log.values.setdefault(key, []).append((log.count, value))
        return Table(base, log, log.count)


def put(table: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """Return the mapping with this item."""
    return (table if isinstance(table, Table) else Table(dict(table), _Log())).changed(key, value)


def without(table: Mapping[K, V], *keys: K) -> Mapping[K, V]:
    """Return the mapping without these keys."""
    for key in keys:
        table = put(table, key, _GONE) if key in table else table
    return table


def as_dict(value: Any) -> Any:
    """Return a table as the dict that msgspec can encode (``enc_hook``)."""
    if isinstance(value, Table):
        return value.merged()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")
