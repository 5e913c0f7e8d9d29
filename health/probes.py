"""What one replica was asked and what it answered: a probe is a bit of real work, and its answer a sign of life that no
beat can give, for beats come from a thread of their own."""

from __future__ import annotations

from dataclasses import dataclass

from rrl.spec.words import ProbeResult

TRIES = 16
"""questions to a role that waits, after which it counts as one that does not answer then"""


@dataclass(slots=True)
class Probes:
    """Since the replica last moved. Whoever moves needs no probe: ``rest``."""

    asked_at: float | None = None
    """when it was first asked without having answered since"""
    last_asked: float = 0.0
    beats: int = 0
    """beats heard since ``asked_at``: it lives, and could have answered"""
    answered_at: float | None = None
    """when it last answered that it works"""
    answers: int = 0
    """so often in a row, in this standstill"""
    failed: tuple[float, str] | None = None
    """when it said that it does not work, and why"""
    mute: bool = False
    """its role cannot be asked: time alone judges it"""

    def ask(self, now: float) -> None:
        if self.asked_at is None:
            self.asked_at, self.beats = now, 0
        self.last_asked = now

    def answer(self, result: ProbeResult, detail: str, now: float) -> None:
        """Take an answer. A late one, to a probe that is no longer open, only shows whether the role has a handler."""
        if result is ProbeResult.NO_HANDLER:
            self.mute = True
            self.rest()
        elif self.asked_at is None:
            return
        elif result is ProbeResult.WORKS:
            self.asked_at, self.answered_at, self.failed = None, now, None
            self.answers += 1
        else:
            self.asked_at, self.failed = None, (now, detail)

    def rest(self) -> None:
        self.asked_at = self.answered_at = self.failed = None
        self.last_asked, self.beats, self.answers = 0.0, 0, 0
