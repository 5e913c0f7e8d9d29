"""The store's state and its log, kept in step: what is written is folded at once and durable at the next flush."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rrl.roles.trajectories.audit import Audit, audit
from rrl.roles.trajectories.log import Log
from rrl.roles.trajectories.records import Binding, Dropped, Record, Settled, decode, encode
from rrl.roles.trajectories.state import State

_KEEP = 2
"""committed steps whose token data stays (rule 9)"""
_COMPACT_GROWTH = 4
"""the log is compacted once it has grown so many times since the last time: rewriting stays a fixed share of writing"""


class Durable:
    """``compact_from``: bytes of log below which it is not compacted."""

    def __init__(self, folder: Path, compact_from: int) -> None:
        self.state = State(_KEEP)
        self._compact_from = compact_from
        self._log = Log(folder)
        for payload in self._log.inherited():
            self.state.apply(decode(payload))
        self._rewrite(self._log.inherited())

    def write(self, record: Record) -> None:
        self._log.append(encode(record))
        self.state.apply(record)

    def flush(self) -> None:
        """Raises OSError or Superseded: then what the disk holds is not known, and this object is useless."""
        self._log.flush()
        if self._log.size >= max(self._compact_from, _COMPACT_GROWTH * self._rewritten):
            self._rewrite(self._log.scan())

    def _rewrite(self, past: Iterable[bytes]) -> None:
        """Leave only what the state needs, and of the ``past`` what the audit needs."""

        def records() -> Iterator[Record]:
            yield self.state.head()
            yield from self._history(map(decode, past))
            yield from self.state.records()

        self._log.rewrite(map(encode, records()))
        self._rewritten = self._log.size

    def _history(self, past: Iterable[Record]) -> Iterator[Record]:
        for record in past:
            match record:
                case Settled() | Dropped():
                    yield record
                case Binding(number, groups, trajectories) if number <= self.state.committed - _KEEP:
                    yield Settled(number, groups, trajectories)

    def audit(self) -> Audit:
        self.flush()
        return audit(map(decode, self._log.scan()))

    def close(self) -> None:
        self._log.close()
