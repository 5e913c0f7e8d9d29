"""Tables of the state: immutable mappings whose changed copies are cheap.

A run of 8,192 ranks records one event for each rank when its trainer restarts. Each event has a state of its own, so a
plain dict would be copied as a whole for each of them.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_GONE: Any = object()


class Table(Mapping[K, V]):
    """A dict, some changes that were made to it since, and no way to change either.

    The order is that of a dict with the same history. A view of all items merges the changes once, and keeps the result
    in their place; this is safe while other threads read the table.
    """

    __slots__ = ("_base", "_changes")

    def __init__(self, base: dict[K, V], changes: dict[K, V]) -> None:
        self._base, self._changes = base, changes

    def merged(self) -> dict[K, V]:
        """Return the whole table, which the caller must not change."""
        if changes := self._changes:
            base = {**self._base, **changes}
            for key in [key for key, value in changes.items() if value is _GONE]:
                del base[key]
            self._base = base
            self._changes = {}  # not before: a reader sees a change twice rather than never
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
        changes = self._changes
        value = changes[key] if key in changes else self._base.get(key, default)
        return default if value is _GONE else value

    def __contains__(self, key: object) -> bool:
        changes = self._changes
        return changes[key] is not _GONE if key in changes else key in self._base

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

        The copies of a table with ``n`` items share its dict for about ``sqrt(n)`` changes, and so cost about as much.
        """
        before = self._changes
        if len(before) ** 2 > len(self._base) or before.get(key) is _GONE:
            return Table(self.merged(), {key: value})  # a key that returns comes last
        return Table(self._base, {**before, key: value})


def put(table: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """Return the mapping with this item."""
    return (table if isinstance(table, Table) else Table(dict(table), {})).changed(key, value)


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
