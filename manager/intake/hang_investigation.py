"""What the manager does about a suspicion before it becomes a restart: asks the suspect for work, and its node's agent
what its processes are doing.

**Probes.** Whom :func:`rrl.health.detection.detectors.probing.to_probe` names is sent ``Probe``, and counts as asked
whether it can be told or not: who cannot be reached has other detectors against it. What it answers is the detectors'
to judge.

**Stacks** are taken once for each hang that is suspected or found, of the suspect and of every member of its gang, and
grouped (:mod:`rrl.health.detection.attribution.stack_groups`). A restart ends the processes, so they are asked for at
the first warning; where a FAIL comes without one, it is told as WARN until they are here, for :data:`STACKS_TIMEOUT_S` s at the
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
from ...core.types import (
    AGENT,
    STACKS,
    Cause,
    Evidence,
    Finding,
    Incarnation,
    Remedy,
    ReplicaId,
    Verdict,
    gang_of,
    replica_id,
)
from ...health.detection.attribution.stack_groups import GroupedStacks, group, main_threads_only, summary_lines
from ...health.detection.detectors.liveness import worker_silence
from ...health.detection.detectors.probing import due_probes
from ...health.detection.health_monitor import HealthMonitor
from ...transport import messages as msg
from ...transport.control.endpoints import Send
from ..model import events as ev
from ..model.state import State
from .finding_gate import apply_settings

_log = logging.getLogger("rrl.manager")

STACKS_TIMEOUT_S = 7.0
"""s that stacks may take, and a FAIL without an earlier warning is held back for them: an agent answers within 2 + 4 s
(rrl.roles.agent.stack_dumps), mostly within one"""
RECOLLECT_AFTER_S = 60.0
"""s before stacks of one life are taken anew, where the suspicion came and went meanwhile"""
MAX_CONCURRENT = 64
"""hangs whose stacks are on their way; of more at once, which have a cause in common, none are taken"""
MAX_DUMP_BYTES = 16 * 2**20
"""of whole dumps of one gang; of further members the main threads only are kept"""
_MAX_LINE_CHARS = 300
"""characters of one line of evidence"""
_MAX_SHOWN_LINES = 3
"""lines of evidence in a finding beside its own and the file's name: five are the most (docs/sources.md)"""
_ID_SPACE_PER_EPOCH = 2**20
"""ids count from this times the epoch: an answer to an earlier manager's question is none to this one's"""


@dataclass(slots=True, eq=False)
class _Incident:
    """One hang of one replica."""

    began: float
    defer_until: float
    """a FAIL is held back so long, unless it is ``done`` before"""
    done: bool = False
    evidence: tuple[Evidence, ...] = ()


@dataclass(slots=True, eq=False)
class _StackCollection:
    """Stacks on their way."""

    incarnation: Incarnation
    id: int
    agents: dict[Incarnation, ReplicaId]
    """whose, and of which agent"""
    dumps: dict[Incarnation, dict[int, str]] = field(default_factory=dict)
    errors: dict[Incarnation, str] = field(default_factory=dict)
    size: int = 0
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, answer: msg.Stacks) -> None:
        if self.agents.get(answer.target) != answer.incarnation.replica or answer.target in {*self.dumps, *self.errors}:
            return
        if answer.dumps:
            self.size += sum(map(len, answer.dumps.values()))
            whole = self.size <= MAX_DUMP_BYTES
            self.dumps[answer.target] = answer.dumps if whole else main_threads_only(answer.dumps)
        else:
            self.errors[answer.target] = answer.error or "no dump"
        if len(self.dumps) + len(self.errors) == len(self.agents):
            self.complete.set()


class HangInvestigator:
    """Of one manager. ``worker_peers`` and ``step_peers`` say where workers and agents can be told something."""

    def __init__(
        self,
        run: RunDir,
        monitor: HealthMonitor,
        state: Callable[[], State],
        record: Callable[[ev.Event], None],
        send: Send,
        now: Callable[[], float],
        worker_peers: Mapping[Incarnation, bytes],
        step_peers: Mapping[str, bytes],
    ) -> None:
        self._run, self._monitor, self._state, self._record = run, monitor, state, record
        self._send, self._now, self._worker_peers, self._step_peers = send, now, worker_peers, step_peers
        self._last_id = 0
        self._incidents: dict[Incarnation, _Incident] = {}
        """by gang: where one member hangs, soon all do"""
        self._collections: dict[int, _StackCollection] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def investigate(self, findings: Sequence[Finding]) -> tuple[list[Finding], float]:
        """Between detecting and telling: have suspects asked. The findings as they are to be told, and when to look
        again (inf: at the next news)."""
        now, settings = self._now(), self._state().job.health
        next_check = now if self._send_probes(now) else inf
        hang_keys = {
            finding.key for finding in findings if _hang_of(finding) and apply_settings(finding, settings) is not None
        }
        hanging = {
            incarnation.gang for finding in findings if finding.key in hang_keys and (incarnation := _hang_of(finding))
        }
        for gang in [
            one
            for one, incident_of_gang in self._incidents.items()
            if one not in hanging and now >= incident_of_gang.began + RECOLLECT_AFTER_S
        ]:
            del self._incidents[gang]
        findings_out = []
        for finding in findings:
            incarnation = _hang_of(finding)
            if incarnation is None or finding.key not in hang_keys:
                findings_out.append(finding)
                continue
            incident = self._incidents.get(incarnation.gang)
            failed = finding.verdict is Verdict.FAIL
            if incident is None or (failed and finding.since > incident.began):  # else they show an earlier standstill
                incident = self._open_incident(incarnation, now)
            deferred = failed and not finding.proof and not incident.done and now < incident.defer_until
            next_check = min(next_check, incident.defer_until) if deferred else next_check
            shown = incident.evidence if finding.since <= incident.began else ()
            findings_out.append(_defer(finding) if deferred else _with_evidence(finding, shown))
        return findings_out, next_check

    def on_reply(self, answer: msg.ProbeReply | msg.Stacks) -> None:
        """Of who is believed. Stacks that nobody waits for any more are passed over; an answer to a probe says how it
        is now, whichever question it answers, but not to one that an earlier manager put."""
        if isinstance(answer, msg.Stacks):
            if (collection := self._collections.get(answer.id)) is not None:
                collection.add(answer)
        elif answer.id // _ID_SPACE_PER_EPOCH == self._state().epoch:
            self._monitor.on_probe_answered(answer.incarnation, answer.result, _one_line(answer.detail), self._now())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── probes ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _send_probes(self, now: float) -> bool:
        suspects = due_probes(self._monitor, self._state().job.limits, now)
        for incarnation in suspects:
            self._monitor.on_probe_sent(incarnation, now)
            if (peer := self._worker_peers.get(incarnation)) is not None:
                self._spawn(self._send(peer, msg.Probe(incarnation, self._next_id()), None))
        return bool(suspects)

    # ── stacks ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _open_incident(self, incarnation: Incarnation, now: float) -> _Incident:
        requests = list(self._stack_requests(incarnation)) if len(self._collections) < MAX_CONCURRENT else []
        incident = self._incidents[incarnation.gang] = _Incident(now, now + STACKS_TIMEOUT_S, done=not requests)
        if requests:
            number = self._next_id()
            self._collections[number] = collection = _StackCollection(
                incarnation, number, {of: agent for _, agent, of, _ in requests}
            )
            self._spawn(self._collect(collection, requests, incident))
        return incident

    def _stack_requests(self, incarnation: Incarnation) -> Iterable[tuple[bytes, ReplicaId, Incarnation, str]]:
        """Whom to ask (its connection and name) for whose stacks, and which step that is."""
        state = self._state()
        gang = gang_of(incarnation.replica)
        for replica in state.replicas.values():
            if gang_of(replica.id) != gang or not replica.is_current or not replica.step or not replica.node:
                continue
            agent = state.replica(replica_id(AGENT, replica.node))
            if (peer := self._step_peers.get(agent.step or "")) is not None:
                yield peer, agent.id, replica.incarnation, replica.step

    async def _collect(
        self,
        collection: _StackCollection,
        requests: Sequence[tuple[bytes, ReplicaId, Incarnation, str]],
        incident: _Incident,
    ) -> None:
        try:
            for peer, _, of, tag in requests:
                await self._send(peer, msg.DumpStacks(of, tag, collection.id), None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(incident.defer_until - self._now()):
                    await collection.complete.wait()
        finally:
            del self._collections[collection.id]
        grouped, file = await asyncio.to_thread(self._save, collection)
        at = self._now()
        lines = tuple(map(_one_line, summary_lines(grouped))) or (_one_line(_failure_text(collection)),)
        shown = [Evidence(STACKS, line, at) for line in lines[:_MAX_SHOWN_LINES]]
        whole = [Evidence(STACKS, f"whole: {file}", at)] if file else []
        incident.evidence, incident.done = (*shown, *whole), True
        if self._state().outcome is None:  # RunEnded is the last record
            self._record(ev.StacksCollected(collection.incarnation, lines, grouped.outliers, file))

    def _save(self, collection: _StackCollection) -> tuple[GroupedStacks, str]:
        """The groups, and the file with everything, relative to the run directory: empty where there is none."""
        grouped = group(collection.dumps)
        if not collection.dumps:
            return grouped, ""
        whole = tag_of("", collection.incarnation).strip(".")
        path = (
            self._run.stacks
            / f"{whole}-{collection.id // _ID_SPACE_PER_EPOCH}.{collection.id % _ID_SPACE_PER_EPOCH}.txt"
        )
        try:
            self._run.stacks.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, "".join(_dump_text(collection, summary_lines(grouped))).encode("utf-8", "replace"))
        except OSError as error:
            _log.warning("cannot save the stacks of %s: %s", collection.incarnation, error)
            return grouped, ""
        return grouped, str(path.relative_to(self._run.path))

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _next_id(self) -> int:
        self._last_id += 1
        return self._state().epoch * _ID_SPACE_PER_EPOCH + self._last_id

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the investigation of a suspected hang failed: %r", error)


def _hang_of(finding: Finding) -> Incarnation | None:
    """Whose hang this suspects or finds; None: it is about something else. Who is silent while its node is heard may
    be stopped, or stuck where it holds the interpreter's lock."""
    about = finding.cause is Cause.HANG or finding.detector == worker_silence.__name__
    return finding.incarnation if about and finding.verdict in (Verdict.WARN, Verdict.FAIL) else None


def _defer(finding: Finding) -> Finding:
    waits = Evidence("manager", "its stacks are taken before it is restarted", finding.since)
    return replace(finding, verdict=Verdict.WARN, remedy=Remedy.NONE, evidence=(*finding.evidence, waits))


def _with_evidence(finding: Finding, more: tuple[Evidence, ...]) -> Finding:
    return replace(finding, evidence=(*finding.evidence, *more)) if more else finding


def _failure_text(collection: _StackCollection) -> str:
    silent = len(collection.agents) - len(collection.errors)
    error = next(iter(collection.errors.values()), f"no answer within {STACKS_TIMEOUT_S:g} s")
    return f"no stacks: {error}" + (f"; {silent} did not answer" if collection.errors and silent else "")


def _dump_text(collection: _StackCollection, summary: Iterable[str]) -> Iterable[str]:
    yield from (f"{line}\n" for line in summary)
    for incarnation in sorted(collection.agents):
        agent = collection.agents[incarnation]
        if incarnation not in collection.dumps:
            yield f"\n==== {incarnation} ({agent}): {collection.errors.get(incarnation, 'no answer')}\n"
        for pid, dump in sorted(collection.dumps.get(incarnation, {}).items()):
            yield f"\n==== {incarnation} ({agent}), process {pid}\n{dump.rstrip()}\n"


def _one_line(text: str) -> str:
    """One line for people: names of functions are whatever a program calls them."""
    return "".join(one if one.isprintable() else " " for one in text)[:_MAX_LINE_CHARS]
