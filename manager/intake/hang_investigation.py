"""Investigate suspected hangs before they lead to a restart: probe the suspect, and collect its stacks.

**Probes.** A ``Probe`` is sent to each replica named by :func:`rrl.health.detection.detectors.probing.due_probes`. A
replica that is not connected counts as probed too, since other detectors find it. The detectors judge the reply.

**Samples of stacks.** In some long passes, loads do not show whether a gang works
(:mod:`rrl.health.detection.detectors.stack_samples`). During such a pass the stacks of all members are collected every
minute, to learn whether they move.

**Stacks** are collected once for each suspected or found hang, from the suspect and from every member of its gang, and
grouped (:mod:`rrl.health.detection.attribution.stack_groups`). A restart ends the processes, so their stacks are
requested at the first WARN. The stage :func:`rrl.health.detection.pipeline.await_stacks` downgrades a FAIL without an
earlier WARN until the stacks have arrived, for at most :data:`STACKS_TIMEOUT_S` seconds. If no agent can be reached,
the FAIL is not delayed. A summary of the stacks is added to the finding's evidence and to the journal; the complete
dumps are saved to a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.launch import tag_of
from ...core.run_dir import write_atomically
from ...core.types import AGENT, STACKS, Cause, Evidence, Finding, Incarnation, ReplicaId, Verdict, gang_of, replica_id
from ...health.detection.attribution.stack_groups import GroupedStacks, group, main_threads_only, sample, summary_lines
from ...health.detection.detectors.liveness import worker_silence
from ...health.detection.detectors.probing import due_probes
from ...health.detection.detectors.stack_samples import due_stack_samples
from ...health.detection.pipeline import HangStacks, is_off
from ...health.detection.records import StackSample
from ...transport import messages as msg
from ..context import RunContext
from ..model import events as ev

_log = logging.getLogger("rrl.manager")

STACKS_TIMEOUT_S = 7.0
"""Timeout (s) for collecting stacks, and the longest time for which a FAIL without an earlier WARN waits for stacks. An
agent replies within 2 + 4 s (rrl.roles.node_agent.stack_dumps), mostly within 1 s."""
RECOLLECT_AFTER_S = 60.0
"""Minimum seconds between two collections for the same gang, if one suspicion ended and another suspicion began."""
MAX_CONCURRENT = 64
"""Maximum number of concurrent stack collections. More hangs at the same time have a common cause, so their stacks are
not collected."""
MAX_DUMP_BYTES = 16 * 2**20
"""Maximum size in bytes of the complete dumps of one gang. Beyond it, only the main threads of further members are
kept."""
_MAX_LINE_CHARS = 300
"""Maximum number of characters of one line of evidence."""
_MAX_SHOWN_LINES = 3
"""Maximum number of lines about stacks in a finding's evidence. With the finding's own line and the file's name, the
evidence has at most five lines (docs/sources.md)."""
_ID_SPACE_PER_EPOCH = 2**20
"""Number of request ids reserved for each epoch, so that a reply to an earlier manager never matches a request of this
manager."""


@dataclass(slots=True, eq=False)
class _Incident:
    """One hang of one gang, from its first suspicion."""

    began: float
    defer_until: float
    """Time (s) until which a FAIL is deferred, unless the incident is ``done`` earlier."""
    done: bool = False
    evidence: tuple[Evidence, ...] = ()


@dataclass(slots=True, eq=False)
class _StackCollection:
    """One pending request for stacks, and the replies so far."""

    incarnation: Incarnation
    id: int
    agents: dict[Incarnation, ReplicaId]
    """For each member of the gang, the agent that was asked for the member's stacks."""
    dumps: dict[Incarnation, dict[int, str]] = field(default_factory=dict)
    errors: dict[Incarnation, str] = field(default_factory=dict)
    size: int = 0
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, answer: msg.Stacks) -> None:
        """Add a reply; ignore a repeated reply, and a reply from an agent that was not asked."""
        if self.agents.get(answer.target) != answer.incarnation.replica or answer.target in {*self.dumps, *self.errors}:
            return
        if answer.dumps:
            self.size += sum(map(len, answer.dumps.values()))
            fits = self.size <= MAX_DUMP_BYTES
            self.dumps[answer.target] = answer.dumps if fits else main_threads_only(answer.dumps)
        else:
            self.errors[answer.target] = answer.error or "no dump"
        if len(self.dumps) + len(self.errors) == len(self.agents):
            self.complete.set()


class HangInvestigator:
    """Probes suspects and collects stacks for one manager."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._last_id = 0
        self._incidents: dict[Incarnation, _Incident] = {}
        """Open incidents, by gang: if one member hangs, the other members soon hang too."""
        self._collections: dict[int, _StackCollection] = {}
        self._sampling: set[Incarnation] = set()
        """Gangs whose stacks are being sampled."""
        self._tasks: set[asyncio.Task[None]] = set()

    def investigate(self, findings: Sequence[Finding]) -> tuple[dict[str, HangStacks], float]:
        """Send due probes, and collect the stacks of new hangs.

        Args:
            findings: Result of ``detect``.

        Returns:
            The stacks of each investigated hang, by the finding's key, and the time (s) at which :meth:`investigate`
            must be called again. The time is inf if only new findings require another call.
        """
        now, settings = self._context.now(), self._context.state().job.health
        next_check = now if self._send_probes(now) else self._sample_stacks(now)
        hangs = [
            (finding, incarnation)
            for finding in findings
            if (incarnation := _hang_of(finding)) is not None and not is_off(finding, settings)
        ]
        hanging = {incarnation.gang for _, incarnation in hangs}
        self._incidents = {
            gang: incident
            for gang, incident in self._incidents.items()
            if gang in hanging or now < incident.began + RECOLLECT_AFTER_S
        }
        stacks = {}
        for finding, incarnation in hangs:
            incident = self._incidents.get(incarnation.gang)
            if incident is None or (
                finding.verdict is Verdict.FAIL and finding.since > incident.began
            ):  # a FAIL about a later hang needs new stacks
                incident = self._open_incident(incarnation, now)
            pending = not incident.done and now < incident.defer_until
            next_check = min(next_check, incident.defer_until) if pending else next_check
            stacks[finding.key] = HangStacks(pending, incident.evidence if finding.since <= incident.began else ())
        return stacks, next_check

    def on_reply(self, answer: msg.ProbeReply | msg.Stacks) -> None:
        """Handle a reply from a current incarnation.

        Stacks that arrive too late are ignored. A reply to any probe of this manager counts, because it shows the
        present state; replies to probes of an earlier manager are ignored.
        """
        if isinstance(answer, msg.Stacks):
            if (collection := self._collections.get(answer.id)) is not None:
                collection.add(answer)
        elif answer.id // _ID_SPACE_PER_EPOCH == self._context.state().epoch:
            self._context.monitor.on_probe_answered(
                answer.incarnation, answer.result, _one_line(answer.detail), self._context.now()
            )

    async def close(self) -> None:
        """Cancel pending probes and stack collections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── probes ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _send_probes(self, now: float) -> bool:
        """Send the probes that are due; return whether any probe was due."""
        suspects = due_probes(self._context.monitor, self._context.state().job.limits, now)
        for incarnation in suspects:
            self._context.monitor.on_probe_sent(incarnation, now)
            if (peer := self._context.connections.workers.get(incarnation)) is not None:
                self._spawn(self._context.send(peer, msg.Probe(incarnation, self._next_id()), None))
        return bool(suspects)

    # ── samples of stacks ──────────────────────────────────────────────────────────────────────────────────────────
    def _sample_stacks(self, now: float) -> float:
        """Begin the samples that are due; return the time (s) of the next sample."""
        due, then = due_stack_samples(self._context.monitor, self._context.state().job.limits, now)
        for gang in due:
            if gang not in self._sampling and len(self._collections) < MAX_CONCURRENT:
                self._sampling.add(gang)
                self._spawn(self._sample(gang))
        return then

    async def _sample(self, gang: Incarnation) -> None:
        """Collect the stacks of a gang once, and report them to the monitor."""
        context = self._context
        members = [view.incarnation for view in context.monitor.workers() if view.incarnation.gang == gang]
        requests = list(self._stack_requests(gang))
        collection = _StackCollection(gang, self._next_id(), {of: agent for _, agent, of, _ in requests})
        self._collections[collection.id] = collection
        stacks: StackSample | None = None
        try:
            if await self._request_stacks(collection, requests, STACKS_TIMEOUT_S):
                stacks = await asyncio.to_thread(sample, collection.dumps, members)
            else:
                _log.debug("the stacks of %s did not arrive in time", gang)
        finally:  # a failed sample is reported, too, so that the next sample is due only after an interval
            self._sampling.discard(gang)
            context.monitor.on_stacks(gang, stacks, context.now())

    # ── stacks ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _open_incident(self, incarnation: Incarnation, now: float) -> _Incident:
        """Open an incident for the incarnation's gang, and request the stacks of all members."""
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
        """Yield (agent's connection, agent's name, incarnation, tag of the step) for each member of the gang."""
        state = self._context.state()
        gang = gang_of(incarnation.replica)
        for replica in state.replicas.values():
            if gang_of(replica.id) != gang or not replica.is_current or not replica.step or not replica.node:
                continue
            agent = state.replica(replica_id(AGENT, replica.node))
            if (peer := self._context.connections.steps.get(agent.step or "")) is not None:
                yield peer, agent.id, replica.incarnation, replica.step

    async def _request_stacks(
        self,
        collection: _StackCollection,
        requests: Sequence[tuple[bytes, ReplicaId, Incarnation, str]],
        timeout_s: float,
    ) -> bool:
        """Request the stacks of a collection, and return whether all replies came within ``timeout_s``.

        Later replies are ignored.
        """
        try:
            for peer, _, of, tag in requests:
                await self._context.send(peer, msg.DumpStacks(of, tag, collection.id), None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    return await collection.complete.wait()
            return False
        finally:
            del self._collections[collection.id]

    async def _collect(
        self,
        collection: _StackCollection,
        requests: Sequence[tuple[bytes, ReplicaId, Incarnation, str]],
        incident: _Incident,
    ) -> None:
        """Request the stacks, wait for the replies, save the dumps, and record a summary."""
        await self._request_stacks(collection, requests, incident.defer_until - self._context.now())
        grouped, file = await asyncio.to_thread(self._save, collection)
        at = self._context.now()
        lines = tuple(map(_one_line, summary_lines(grouped))) or (_one_line(_failure_text(collection)),)
        shown = [Evidence(STACKS, line, at) for line in lines[:_MAX_SHOWN_LINES]]
        saved = [Evidence(STACKS, f"all stacks: {file}", at)] if file else []
        incident.evidence, incident.done = (*shown, *saved), True
        if self._context.state().outcome is None:  # RunEnded is the last record
            self._context.record(ev.StacksCollected(collection.incarnation, lines, grouped.outliers, file))

    def _save(self, collection: _StackCollection) -> tuple[GroupedStacks, str]:
        """Group the stacks and save the dumps.

        Returns the groups, and the file's path relative to the run directory ('' if nothing was saved).
        """
        grouped = group(collection.dumps)
        if not collection.dumps:
            return grouped, ""
        name = tag_of("", collection.incarnation).strip(".")
        path = (
            self._context.run_dir.stacks
            / f"{name}-{collection.id // _ID_SPACE_PER_EPOCH}.{collection.id % _ID_SPACE_PER_EPOCH}.txt"
        )
        try:
            self._context.run_dir.stacks.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, "".join(_dump_text(collection, summary_lines(grouped))).encode("utf-8", "replace"))
        except OSError as error:
            _log.warning("cannot save the stacks of %s: %s", collection.incarnation, error)
            return grouped, ""
        return grouped, str(path.relative_to(self._context.run_dir.path))

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _next_id(self) -> int:
        self._last_id += 1
        return self._context.state().epoch * _ID_SPACE_PER_EPOCH + self._last_id

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the investigation of a suspected hang failed: %r", error)


def _hang_of(finding: Finding) -> Incarnation | None:
    """Return the incarnation whose hang this finding reports or suspects; None if the finding is not about a hang.

    A silent worker whose node sends heartbeats counts as hung too: it may be stopped, or stuck while it holds the GIL.
    """
    about = finding.cause is Cause.HANG or finding.detector == worker_silence.__name__
    return finding.incarnation if about and finding.verdict in (Verdict.WARN, Verdict.FAIL) else None


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
    """Return the text as one printable line of limited length, because names of functions may contain any character."""
    return "".join(character if character.isprintable() else " " for character in text)[:_MAX_LINE_CHARS]
