"""Sends the probes that a judge requests, and delivers the answers of the workers."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from rrl.benchmarks.scenarios.actors import Member
from rrl.benchmarks.scenarios.judge import Judge
from rrl.core.types import Incarnation, ProbeResult


class ProbeExchange:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._answers: list[tuple[float, Incarnation, bool]] = []

    def exchange(self, judge: Judge, members: Mapping[Incarnation, Member], now: float, clock: float) -> None:
        """Send the probes that the judge requests now, and deliver the answers that have arrived.

        A cut network loses probes and answers. ``clock`` is the manager's clock (s), which the judge uses.
        """
        for incarnation in judge.due_probes(clock):
            member = members.get(incarnation)
            if member is None or now < max(member.node.cut, member.muted_until):
                continue
            if (reply := member.reply(now, self._random, judge.probes_work)) is not None:
                self._answers.append((reply[0], incarnation, reply[1]))
        for answer in [each for each in self._answers if each[0] <= now]:
            self._answers.remove(answer)
            _, incarnation, ok = answer
            member = members.get(incarnation)
            if member is None or not member.runs(now) or now < max(member.node.cut, member.muted_until):
                continue
            no_handler = judge.probes_work and not member.probed
            result = ProbeResult.NO_HANDLER if no_handler else ProbeResult.WORKS if ok else ProbeResult.FAILED
            judge.answered(incarnation, result, "" if ok else "EngineDeadError", clock)
