"""Whether a process requests deltas for the versions that it pulls, and what it has received."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from ...core.run_spec import DeltaSetting
from ...core.types import WeightTraffic

_SMOOTHING = 0.5
"""Weight of the newest pull in the smoothed duration of a byte."""
_FIRST_PAUSE, _MAX_PAUSE = 2, 64
"""Minimum and maximum number of pulls by the faster way before the slower way is tried again. The number doubles with
each attempt that was slower again. If whole versions take r times as long, they pause r² times as long, so that the
attempts cost little. They are tried nevertheless, because the first version, which is always whole, may have waited."""

_log = logging.getLogger("rrl.weights")


class Deltas:
    """The choice between deltas and whole chunks, derived from the durations of earlier pulls of this process.

    Args:
        setting: ``[transport] delta``.
    """

    def __init__(self, setting: DeltaSetting = "auto") -> None:
        self._setting = setting
        self._s_per_byte: dict[bool, float] = {}
        """Smoothed seconds per byte of a version; True: some of its chunks were made from deltas."""
        self._faster, self._pulls, self._pause = True, 0, _FIRST_PAUSE
        self._received = 0
        """Bytes that arrived for a version that is not complete yet."""
        self._wrong: set[str] = set()
        self.traffic = WeightTraffic()
        """What has arrived of complete versions, with what arrived of incomplete versions before them."""

    @property
    def enabled(self) -> bool:
        """Whether processes of the run may request deltas, so that the changes between versions are kept."""
        return self._setting is not False

    def choose(self) -> bool:
        """Return whether the next pull requests deltas."""
        if self._setting != "auto" or len(self._s_per_byte) < 2:
            return self.enabled
        faster = self._s_per_byte[True] <= self._s_per_byte[False]
        if faster != self._faster:
            self._faster, self._pulls, self._pause = faster, 0, _FIRST_PAUSE
        self._pulls += 1
        if self._pulls * min(1.0, self._s_per_byte[True] / self._s_per_byte[False]) ** 2 <= self._pause:
            return faster
        self._pulls, self._pause = 0, min(2 * self._pause, _MAX_PAUSE)
        return not faster

    def on_received(self, nbytes: int) -> None:
        """Count bytes that arrived."""
        self._received += nbytes

    def on_pulled(self, nbytes: int, whole: int, changed: int, seconds: float) -> None:
        """Record that a version of ``nbytes`` bytes is complete.

        This pull took ``seconds``. It received ``whole`` bytes in whole chunks, and made ``changed`` bytes from deltas.
        """
        received, self._received = self.traffic.received + self._received, 0
        self.traffic = replace(self.traffic, received=received, nbytes=self.traffic.nbytes + nbytes)
        if whole + changed:
            way, pace = changed > 0, seconds / (whole + changed)
            old = self._s_per_byte.get(way, pace)
            self._s_per_byte[way] = old + _SMOOTHING * (pace - old)

    def on_wrong(self, source: str) -> None:
        """Record that a delta of a source did not result in the right bytes; the first time is logged."""
        self.traffic = replace(self.traffic, fallbacks=self.traffic.fallbacks + 1)
        if source not in self._wrong:
            self._wrong.add(source)
            _log.warning("a delta of %s results in wrong bytes: whole chunks are requested instead", source)
