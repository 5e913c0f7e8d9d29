"""What a judge asks of workers, and their answers on the way back."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from rrl.core.types import Life, ProbeResult
from rrl.tests.support.scenarios.actors import Member
from rrl.tests.support.scenarios.judge import Judge


class Questions:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._answers: list[tuple[float, Life, bool]] = []

    def ask(self, judge: Judge, living: Mapping[Life, Member], now: float) -> None:
        """Put what it wants to know, and bring what was answered by now. What a cut network swallows is lost."""
        for life in judge.asks(now):
            member = living.get(life)
            if member is None or now < max(member.node.cut, member.mute):
                continue
            if (reply := member.reply(now, self._random, judge.asks_for_work)) is not None:
                self._answers.append((reply[0], life, reply[1]))
        for answer in [each for each in self._answers if each[0] <= now]:
            self._answers.remove(answer)
            _, life, ok = answer
            member = living.get(life)
            if member is None or not member.runs(now) or now < max(member.node.cut, member.mute):
                continue
            no_handler = judge.asks_for_work and not member.probed
            result = ProbeResult.NO_HANDLER if no_handler else ProbeResult.WORKS if ok else ProbeResult.FAILED
            judge.answered(life, result, "" if ok else "EngineDeadError", now)
