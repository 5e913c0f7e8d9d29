"""How long the silence of a source is normal: learnt from what chunks have taken so far."""

from __future__ import annotations

FIRST = 1.0
"""s of silence while no pace is known: what a connection and its handshake may take (measured p99: 17 ms)"""
LEAST = 0.2
"""s; four of the answers that say "not yet" (calls.NOT_YET_EVERY) must be missing before somebody counts as silent"""
_FEW = 4
"""times the usual for a chunk; the time of one chunk varies by a factor of two where a NIC is shared"""
_GAIN = 0.25
"""of a new sample in the smoothed value: follows a change within a window of chunks"""


class Pace:
    """Kept across versions: from the second one on, a slow source is known by its first chunk. By chunk and not by
    byte: a version's last chunk may be short, and takes a message's time however few its bytes are."""

    def __init__(self, first: float = FIRST, least: float = LEAST) -> None:
        self._first, self._least = first, least
        self._usual: float | None = None

    def took(self, seconds: float) -> None:
        """A chunk came so long after the one before it, or after it was asked for."""
        self._usual = seconds if self._usual is None else self._usual + _GAIN * (seconds - self._usual)

    def patience(self) -> float:
        """s of silence after which the source of a chunk is given up."""
        return max(self._least, self._first if self._usual is None else _FEW * self._usual)
