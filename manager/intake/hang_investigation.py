"""What the manager does about a suspicion before it becomes a restart: asks the suspect for work, and its node's agent
what its processes are doing.

**Probes.** Whom :func:`rrl.health.detection.detectors.probing.to_probe` names is sent ``Probe``, and counts as asked
whether it can be told or not: who cannot be reached has other detectors against it. What it answers is the detectors'
to judge.

**Stacks** are taken once for each hang that is suspected or found, of the suspect and of every member of its gang, and
grouped (:mod:`rrl.health.detection.attribution.stack_groups`). A restart ends the processes, so they are asked for at
the first warning; where a FAIL comes without one, it is told as WARN until they are here, for :data:`WITHIN` s at the
most, and not at all where no agent can be asked. What was seen stands in the finding's evidence and in the journal, the
whole in a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from msgspec.structs import replace

from ...core.launch import tag_of
from ...core.run_dir import RunDir, write_atomically
from ...core.types import AGENT, STACKS, Cause, Evidence, Finding, Life, Remedy, ReplicaId, Verdict, gang_of, replica_id
from ...health.detection.attribution.stack_groups import Grouped, group, main_threads_only, told
from ...health.detection.detectors.liveness import worker_silence
from ...health.detection.detectors.probing import to_probe
from ...health.detection.watch import Watch
from ...transport import messages as msg
from ...transport.control.endpoints import Send
from ..model import events as ev
from ..model.state import State
from .finding_gate import heeded

_log = logging.getLogger("rrl.manager")

WITHIN = 7.0
"""s that stacks may take, and a FAIL without an earlier warning is held back for them: an agent answers within 2 + 4 s
(rrl.roles.agent.stack_dumps), mostly within one"""
AGAIN = 60.0
"""s before stacks of one life are taken anew, where the suspicion came and went meanwhile"""
AT_ONCE = 64
"""hangs whose stacks are on their way; of more at once, which have a cause in common, none are taken"""
MOST_BYTES = 16 * 2**20
"""of whole dumps of one gang; of further members the main threads only are kept"""
_LINE = 300
"""characters of one line of evidence"""
_SHOWN = 3
"""lines of evidence in a finding beside its own and the file's name: five are the most (docs/sources.md)"""
_EPOCH = 2**20
"""ids count from this times the epoch: an answer to an earlier manager's question is none to this one's"""


@dataclass(slots=True, eq=False)
class _Episode:
    """One hang of one replica."""

    began: float
    until: float
    """a FAIL is held back so long, unless it is ``over`` before"""
    over: bool = False
    evidence: tuple[Evidence, ...] = ()


@dataclass(slots=True, eq=False)
class _Taking:
    """Stacks on their way."""

    life: Life
    id: int
    asked: dict[Life, ReplicaId]
    """whose, and of which agent"""
    dumps: dict[Life, dict[int, str]] = field(default_factory=dict)
    errors: dict[Life, str] = field(default_factory=dict)
    size: int = 0
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, answer: msg.Stacks) -> None:
        if self.asked.get(answer.of) != answer.life.replica or answer.of in {*self.dumps, *self.errors}:
            return
        if answer.dumps:
            self.size += sum(map(len, answer.dumps.values()))
            whole = self.size <= MOST_BYTES
            self.dumps[answer.of] = answer.dumps if whole else main_threads_only(answer.dumps)
        else:
            self.errors[answer.of] = answer.error or "no dump"
        if len(self.dumps) + len(self.errors) == len(self.asked):
            self.complete.set()


class Suspicion:
    """Of one manager. ``workers`` and ``steps`` say where workers and agents can be told something."""

    def __init__(
        self,
        run: RunDir,
        watch: Watch,
        state: Callable[[], State],
        record: Callable[[ev.Event], None],
        send: Send,
        now: Callable[[], float],
        workers: Mapping[Life, bytes],
        steps: Mapping[str, bytes],
    ) -> None:
        self._run, self._watch, self._state, self._record = run, watch, state, record
        self._send, self._now, self._workers, self._steps = send, now, workers, steps
        self._count = 0
        self._episodes: dict[Life, _Episode] = {}
        """by gang: where one member hangs, soon all do"""
        self._takings: dict[int, _Taking] = {}
        self._running: set[asyncio.Task[None]] = set()

    def consider(self, findings: Sequence[Finding]) -> tuple[list[Finding], float]:
        """Between detecting and telling: have suspects asked. The findings as they are to be told, and when to look
        again (inf: at the next news)."""
        now, view = self._now(), self._state().job.health
        again = now if self._probe(now) else inf
        wanted = {finding.key for finding in findings if _hangs(finding) and heeded(finding, view) is not None}
        hanging = {life.gang for finding in findings if finding.key in wanted and (life := _hangs(finding))}
        for gang in [one for one, held in self._episodes.items() if one not in hanging and now >= held.began + AGAIN]:
            del self._episodes[gang]
        heard = []
        for finding in findings:
            life = _hangs(finding)
            if life is None or finding.key not in wanted:
                heard.append(finding)
                continue
            episode = self._episodes.get(life.gang)
            failed = finding.verdict is Verdict.FAIL
            if episode is None or (failed and finding.since > episode.began):  # else they show an earlier standstill
                episode = self._begin(life, now)
            holds = failed and not finding.proof and not episode.over and now < episode.until
            again = min(again, episode.until) if holds else again
            shown = episode.evidence if finding.since <= episode.began else ()
            heard.append(_held(finding) if holds else _with(finding, shown))
        return heard, again

    def heard(self, answer: msg.Probed | msg.Stacks) -> None:
        """Of who is believed. Stacks that nobody waits for any more are passed over; an answer to a probe says how it
        is now, whichever question it answers, but not to one that an earlier manager put."""
        if isinstance(answer, msg.Stacks):
            if (taking := self._takings.get(answer.id)) is not None:
                taking.add(answer)
        elif answer.id // _EPOCH == self._state().epoch:
            self._watch.answered(answer.life, answer.result, _clean(answer.detail), self._now())

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    # ── probes ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _probe(self, now: float) -> bool:
        suspects = to_probe(self._watch, self._state().job.limits, now)
        for life in suspects:
            self._watch.asked(life, now)
            if (peer := self._workers.get(life)) is not None:
                self._keep(self._send(peer, msg.Probe(life, self._next()), None))
        return bool(suspects)

    # ── stacks ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _begin(self, life: Life, now: float) -> _Episode:
        orders = list(self._orders(life)) if len(self._takings) < AT_ONCE else []
        episode = self._episodes[life.gang] = _Episode(now, now + WITHIN, over=not orders)
        if orders:
            number = self._next()
            self._takings[number] = taking = _Taking(life, number, {of: agent for _, agent, of, _ in orders})
            self._keep(self._take(taking, orders, episode))
        return episode

    def _orders(self, life: Life) -> Iterable[tuple[bytes, ReplicaId, Life, str]]:
        """Whom to ask (its connection and name) for whose stacks, and which step that is."""
        state = self._state()
        gang = gang_of(life.replica)
        for replica in state.replicas.values():
            if gang_of(replica.id) != gang or not replica.believed or not replica.step or not replica.node:
                continue
            agent = state.replica(replica_id(AGENT, replica.node))
            if (peer := self._steps.get(agent.step or "")) is not None:
                yield peer, agent.id, replica.life, replica.step

    async def _take(
        self, taking: _Taking, orders: Sequence[tuple[bytes, ReplicaId, Life, str]], episode: _Episode
    ) -> None:
        try:
            for peer, _, of, tag in orders:
                await self._send(peer, msg.TakeStacks(of, tag, taking.id), None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(episode.until - self._now()):
                    await taking.complete.wait()
        finally:
            del self._takings[taking.id]
        grouped, file = await asyncio.to_thread(self._written, taking)
        at = self._now()
        lines = tuple(map(_clean, told(grouped))) or (_clean(_why_none(taking)),)
        shown = [Evidence(STACKS, line, at) for line in lines[:_SHOWN]]
        whole = [Evidence(STACKS, f"whole: {file}", at)] if file else []
        episode.evidence, episode.over = (*shown, *whole), True
        if self._state().outcome is None:  # RunEnded is the last record
            self._record(ev.StacksTaken(taking.life, lines, grouped.outliers, file))

    def _written(self, taking: _Taking) -> tuple[Grouped, str]:
        """The groups, and the file with everything, relative to the run directory: empty where there is none."""
        grouped = group(taking.dumps)
        if not taking.dumps:
            return grouped, ""
        whole = tag_of("", taking.life).strip(".")
        path = self._run.stacks / f"{whole}-{taking.id // _EPOCH}.{taking.id % _EPOCH}.txt"
        try:
            self._run.stacks.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, "".join(_document(taking, told(grouped))).encode("utf-8", "replace"))
        except OSError as error:
            _log.warning("cannot save the stacks of %s: %s", taking.life, error)
            return grouped, ""
        return grouped, str(path.relative_to(self._run.path))

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _next(self) -> int:
        self._count += 1
        return self._state().epoch * _EPOCH + self._count

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the investigation of a suspected hang failed: %r", error)


def _hangs(finding: Finding) -> Life | None:
    """Whose hang this suspects or finds; None: it is about something else. Who is silent while its node is heard may
    be stopped, or stuck where it holds the interpreter's lock."""
    about = finding.cause is Cause.HANG or finding.detector == worker_silence.__name__
    return finding.life if about and finding.verdict in (Verdict.WARN, Verdict.FAIL) else None


def _held(finding: Finding) -> Finding:
    waits = Evidence("manager", "its stacks are taken before it is restarted", finding.since)
    return replace(finding, verdict=Verdict.WARN, remedy=Remedy.NONE, evidence=(*finding.evidence, waits))


def _with(finding: Finding, more: tuple[Evidence, ...]) -> Finding:
    return replace(finding, evidence=(*finding.evidence, *more)) if more else finding


def _why_none(taking: _Taking) -> str:
    silent = len(taking.asked) - len(taking.errors)
    said = next(iter(taking.errors.values()), f"no answer within {WITHIN:g} s")
    return f"no stacks: {said}" + (f"; {silent} did not answer" if taking.errors and silent else "")


def _document(taking: _Taking, summary: Iterable[str]) -> Iterable[str]:
    yield from (f"{line}\n" for line in summary)
    for life in sorted(taking.asked):
        agent = taking.asked[life]
        if life not in taking.dumps:
            yield f"\n==== {life} ({agent}): {taking.errors.get(life, 'no answer')}\n"
        for pid, dump in sorted(taking.dumps.get(life, {}).items()):
            yield f"\n==== {life} ({agent}), process {pid}\n{dump.rstrip()}\n"


def _clean(text: str) -> str:
    """One line for people: names of functions are whatever a program calls them."""
    return "".join(one if one.isprintable() else " " for one in text)[:_LINE]
