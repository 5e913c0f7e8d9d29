"""Simulates a run: all processes send heartbeats every second, events occur, and one judge receives the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from math import inf
from random import Random

from rrl.benchmarks.scenarios.actors import COLLECTIVE, REQUESTING, STARTING, STORE, STORE_PHASES, Gang, Member, Node
from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.hardware import gpus_of, uuid_of
from rrl.benchmarks.scenarios.judge import Judge
from rrl.benchmarks.scenarios.places import placed
from rrl.benchmarks.scenarios.questions import ProbeExchange
from rrl.core.phases import WAIT_DATA
from rrl.core.types import DataReport, Incarnation, NodeName, OutsideKind, OutsideWait, gang_of, role_of

HEARTBEAT_S = 1.0
"""Heartbeat interval (s): the default of ``limits.heartbeat``."""
HEARTBEATS_PER_LOAD_REPORT = 2
"""Number of heartbeats between two reports of the load by an agent."""
CONNECTION_KEEPS_S = 30.0
"""Time (s) for which a cut connection keeps messages. After a longer cut, the sender begins with a Hello."""
_RECONNECT_S = (0.5, 3.0)
"""Range of the time (s) that a worker takes to connect to a manager again."""
_PROMOTION_S = 1.0
"""Time (s) from the promotion of a standby process to its Hello as the new incarnation."""
_NOTE_AFTER_S = 5.0
"""Time (s) for which the trainer waits for data before the store reports who holds what they lack."""
_NO_REPORT = DataReport()
_OUTSIDE = OutsideWait(OutsideKind.AGENT, 1)
_MIN_REPORTED_PHASE_S = 0.25
"""Minimum duration (s) of a phase that a message of its own reports."""


class World:
    def __init__(self, name: str, scenario: Scenario, seed: int, judge: Judge) -> None:
        self.scenario, self.seed, self.judge = scenario, seed, judge
        self.name = name
        self.random = self.chance("world")
        self.now = 0.0
        self.nodes, self.gangs, self.spares = placed(scenario, seed, self.chance)
        self.deaf_until = 0.0
        """Time (s) until which no manager receives messages, because there is none or it is stopped."""
        self.deaf_how = ""
        self.cluster_away = 0.0
        self.wall_ahead = 0.0
        """Seconds by which the wall clock of the manager's node is ahead of ``now``."""
        self.clock_ahead = 0.0
        """Seconds by which the manager's clock is ahead of ``now``. Only when a manager starts, its clock is set by the
        wall clock."""
        self._stopped_at = 0.0
        """Value of the manager's clock (s) when the newest manager ended."""
        self.poll_at = 0.0
        self._gpus = gpus_of(scenario)
        self._questions = ProbeExchange(self.random)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.died: Callable[[Member], None] | None = None
        """A function that is called with each member whose process has ended."""
        self._unreported_ends: list[Member] = []
        """Ended members whose end is not reported to the judge yet."""
        self.waits_outside_until = 0.0
        """Time (s) until which the store reports that the run waits for somebody outside of it."""
        self._derives_outside_waits = not any(event.do == "waits_outside" for event in scenario.event)
        self._ticks = 0
        self._queued = {name: queue.has for name, queue in scenario.queues.items()}
        """Number of units in each queue."""
        self.members_by_incarnation = {one.incarnation: one for gang in self.gangs.values() for one in gang.members}
        for member in self.members_by_incarnation.values():
            self._hand_out(member)

    def chance(self, what: str) -> Random:
        return Random(f"{self.name}:{self.seed}:{what}")

    # ── members and nodes ─────────────────────────────────────────────────────────────────────────────────────────────
    def members(self, patterns: Iterable[str]) -> list[Member]:
        """Return the members whose names match one of ``patterns``; a gang's name is that of its first member."""
        wanted = tuple(patterns)
        return [
            one
            for gang in self.gangs.values()
            for one in gang.members
            if any(fnmatchcase(one.incarnation.replica, each) for each in wanted)
        ]

    def nodes_of(self, patterns: Iterable[str]) -> list[Node]:
        found: dict[NodeName, Node] = {}
        for each in patterns:
            if each.startswith("@"):
                found.update({one.node.name: one.node for one in self.members([each[1:]])})
            else:
                found.update({name: node for name, node in self.nodes.items() if fnmatchcase(name, each)})
        return list(found.values())

    def gang(self, incarnation: Incarnation) -> Gang:
        return self.gangs[gang_of(incarnation.replica)]

    def member(self, incarnation: Incarnation) -> Member | None:
        return self.members_by_incarnation.get(incarnation)

    # ── one tick (1 s) ───────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def is_deaf(self) -> bool:
        return self.now < self.deaf_until

    @property
    def clock(self) -> float:
        """Return the manager's clock (s)."""
        return self.now + self.clock_ahead

    def tick(self) -> None:
        """Play one heartbeat interval and deliver its messages."""
        self.now += HEARTBEAT_S
        self._ticks += 1
        if self.deaf_how and not self.is_deaf:
            self._resume_manager()
        for due in [each for each in self._later if each[0] <= self.now]:
            self._later.remove(due)
            due[1]()
        if self._unreported_ends and not self.is_deaf:
            self._report_ends()
        for node in self.nodes.values():
            self._agent_heartbeat(node)
        store = self.gangs.get(STORE)
        stands = store is not None and not store.productive(self.now)
        works = self._productive()
        for gang in self.gangs.values():
            if gang.launch_at <= self.now:
                self._launch(gang)
            if not gang.joined:
                self._starts(gang)
            else:
                self._goes_on(gang, stands, works)
        if not self.is_deaf:
            self._questions.exchange(self.judge, self.members_by_incarnation, self.now, self.clock)
            for asked in self.judge.due_stacks(self.clock):
                self.judge.stacks(asked, self.gangs[asked.replica].stacks(self.now), self.clock)
            self._poll_cluster()

    def _productive(self) -> dict[str, float]:
        """Return the share of each role's replicas that work."""
        working: dict[str, list[bool]] = {}
        for gang in self.gangs.values():
            working.setdefault(gang.role, []).append(gang.productive(self.now))
        return {role: sum(each) / len(each) for role, each in working.items()}

    def _agent_heartbeat(self, node: Node) -> None:
        if node.excluded:
            return
        if node.state_until <= self.now:
            node.state, node.detail, node.state_until = "up", "", inf
        if self.is_deaf or not node.agent_is_running(self.now) or self.now < node.cut:
            return
        if not node.introduced:
            node.introduced = True
            self.judge.agent(node.name, node.agent, self.clock, node.boot)
        else:
            self.judge.agent(node.name, node.agent, self.clock)

    def _launch(self, gang: Gang) -> None:
        """Launch the next incarnation."""
        gang.launch_at = inf
        gang.launched_at = self.now
        if gang.start_takes:
            takes, on_launch = gang.start_takes.pop(0)
            on_launch(gang.incarnation)
        elif gang.promoted_from:
            takes = _PROMOTION_S
        else:
            takes = gang.table.starts.draw(gang.random)  # type: ignore[union-attr]
        gang.joins_at = self.now + takes
        standbys: list[Incarnation | None] = [*gang.promoted_from] or [None] * len(gang.members)
        gang.promoted_from = []
        for member, standby in zip(gang.members, standbys, strict=True):
            self.members_by_incarnation[member.incarnation] = member
            if not member.gpu_indices:
                self._hand_out(member)
            if not self.is_deaf:
                self.judge.launched(member.incarnation, member.node.name, self.clock, standby)

    def _hand_out(self, member: Member) -> None:
        """Assign the first unused GPUs of the node to a member; if there are too few, assign its first GPUs."""
        taken = {
            one
            for other in self.members_by_incarnation.values()
            if other is not member and other.node is member.node and not other.ended
            for one in other.gpu_indices
        }
        free = [index for index in range(self._gpus) if index not in taken]
        enough = len(free) >= member.gpus
        member.gpu_indices = tuple(free[: member.gpus]) if enough else tuple(range(min(member.gpus, self._gpus)))

    def used(self, node: NodeName) -> set[int]:
        """Return the GPUs of the node that a joined process uses."""
        here = (one for gang in self.gangs.values() if gang.joined for one in gang.members if one.node.name == node)
        return {gpu for one in here if not one.ended for gpu in one.gpu_indices}

    def _greets(self, member: Member, phase: str) -> None:
        """Send a Hello.

        The first Hello of an incarnation has the phase ``starting``, because the role has not entered a phase yet.
        """
        if not member.greeted and self.now - self.gang(member.incarnation).entered_at <= HEARTBEAT_S:
            phase = STARTING.phase
        member.welcomed = member.greeted = True
        self.judge.hello(member.incarnation, member.node.name, phase, self.clock)
        if member.gpu_indices:
            self.judge.gpus(
                member.incarnation, member.node.name, [uuid_of(member.node.name, gpu) for gpu in member.gpu_indices]
            )

    def _starts(self, gang: Gang) -> None:
        if gang.launch_at < inf:
            return
        for member in gang.members:
            if member.runs(self.now) and member.node.agent_is_running(self.now) and not self.is_deaf:
                self.judge.alive(member.incarnation, self.clock)
        if self.now >= gang.joins_at and all(member.works(self.now) for member in gang.members):
            gang.join(STARTING, HEARTBEAT_S, self.now)

    def _goes_on(self, gang: Gang, stands: bool, works: dict[str, float]) -> None:
        now = self.now
        share = works.get(gang.rhythm_phase.waits, 1.0) if gang.rhythm_phase.waits else 1.0
        if gang.role == role_of(STORE):
            share = min(share, self._requests())
        gang.data_arrive(HEARTBEAT_S * share if not stands else 0.0, now)
        if self._can(gang, stands):
            if gang.remaining > 0:
                gang.advance(now, HEARTBEAT_S, share)
            while gang.remaining <= 0 and gang.alive and self._may_end(gang):
                self._hand_over(gang)
                if gang.rhythm_phase.rate is None and gang.rhythm_phase.phase == "publish":
                    gang.work += 1
                    gang.reported_progress = int(gang.work)
                gang.next_phase(now)
                if gang.remaining >= _MIN_REPORTED_PHASE_S or not self._may_end(gang):
                    for member in gang.members:
                        self._send(member, "entered", self._reported(gang, member, False))
                    break
            gang.held = gang.remaining <= 0 and gang.alive
        elif any(now < member.false_progress_until for member in gang.members) and gang.rhythm_phase.rate:
            gang.work += gang.rhythm_phase.rate
            gang.reported_progress = int(gang.work)
        for member in gang.members:
            self._heartbeat(gang, member, stands)

    def _requests(self) -> float:
        """Return 1 if any replica works and therefore sends requests that the store can serve, else 0."""
        working = (gang for gang in self.gangs.values() if gang.rhythm_phase.phase in REQUESTING or gang.counts_work)
        return float(any(gang.productive(self.now) and not gang.held for gang in working))

    def _may_end(self, gang: Gang) -> bool:
        """Return whether a replica that has worked through its phase may end the phase now."""
        phase = gang.rhythm_phase
        awaited = (
            other.ended_in_round.get(ended, 0) >= gang.round_number
            for role, ended in phase.until.items()
            for other in self.gangs.values()
            if other.role == role
        )
        capacity = (self._queued[queue] + units <= self._holds(queue) for queue, units in phase.puts.items())
        supply = (self._queued[queue] >= units for queue, units in phase.takes.items())
        return all(awaited) and all(capacity) and all(supply)

    def _holds(self, queue: str) -> float:
        return self.scenario.queues[queue].holds or inf

    def _hand_over(self, gang: Gang) -> None:
        """Change the queues by the units that the gang adds or takes at the end of its current phase."""
        for queue, units in gang.rhythm_phase.puts.items():
            self._queued[queue] += units
        for queue, units in gang.rhythm_phase.takes.items():
            self._queued[queue] -= units

    def _can(self, gang: Gang, stands: bool) -> bool:
        if not gang.alive or (stands and gang.role != "trajectories" and gang.rhythm_phase.phase in STORE_PHASES):
            return False
        if len(gang.members) == 1 or gang.rhythm_phase.phase in COLLECTIVE or gang.rhythm_phase.waits:
            return all(member.works(self.now) for member in gang.members)
        return True

    def _data_report(self, gang: Gang) -> DataReport:
        """Return what a store that works reports about the data of the trainer.

        The store has data for a trainer that is stuck in ``wait_data`` once they have arrived.
        """
        if gang.role != role_of(STORE) or not gang.productive(self.now):
            return _NO_REPORT
        if any(
            other.data_arrives_in <= 0 and self._may_end(other)
            for other in self.gangs.values()
            if other.is_stuck_taking_data(self.now)
        ):
            return DataReport(untaken=True)
        return DataReport(outside=_OUTSIDE) if self._waits_outside() else _NO_REPORT

    def _waits_outside(self) -> bool:
        """Return whether the store finds that only somebody outside of the run can complete the trainer's data.

        If the scenario does not say so, this is the case in a run with agents while the trainer waits and no replica
        has work that it could hold: all rollouts, scorers and agents of the run are healthy, and wait for work.
        """
        if not self._derives_outside_waits:
            return self.now < self.waits_outside_until
        by_role: dict[str, list[Gang]] = {}
        for gang in self.gangs.values():
            by_role.setdefault(gang.role, []).append(gang)
        if not by_role.keys() & {"agents", "endpoint"}:
            return False
        trainers = [gang for gang in by_role.get("trainer", ()) if gang.rhythm_phase.phase == WAIT_DATA]
        workers = [gang for role in ("rollout", "reward", "agents") for gang in by_role.get(role, ())]
        return any(self.now - gang.entered_at >= _NOTE_AFTER_S for gang in trainers) and all(
            gang.rhythm_phase.phase == "wait_work" and gang.productive(self.now) for gang in workers
        )

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _reported(self, gang: Gang, member: Member, stands: bool) -> tuple[object, ...]:
        return gang.rhythm_phase.phase, gang.reported_progress, gang.reported_waits_for(member, stands)

    def _heartbeat(self, gang: Gang, member: Member, stands: bool) -> None:
        now = self.now
        if member.ended or not member.node.is_running(now) or member.sent_goodbye:
            return
        if not member.is_frozen(now):
            self._send_heartbeat(gang, member, stands)
        if self._ticks % HEARTBEATS_PER_LOAD_REPORT == 0 and now >= member.node.cut and not self.is_deaf:
            from_agent = self.scenario.cluster.loads and member.node.agent_is_running(now)
            loads = gang.loads(member, now)
            self.judge.load(member.incarnation, loads, member.gpus > 0, from_agent, self.clock)

    def _send_heartbeat(self, gang: Gang, member: Member, stands: bool) -> None:
        now = self.now
        waits = member.outbox or now < max(member.node.cut, member.muted_until, member.late_until) or self.is_deaf
        if waits:
            self._send(member, "heartbeat", (*self._reported(gang, member, stands), self._data_report(gang)))
            self._deliver(member)
        else:
            if not member.welcomed:
                self._greets(member, gang.rhythm_phase.phase)
            phase, done, waits_for = self._reported(gang, member, stands)
            data = self._data_report(gang)
            self.judge.heartbeat(member.incarnation, phase, done, waits_for, data, self.clock)  # type: ignore[arg-type]

    def _send(self, member: Member, method: str, arguments: tuple[object, ...]) -> None:
        """Queue a message of a member; the network or a flood of log lines may delay it."""
        now = self.now
        if self.is_deaf or not member.runs(now):
            return
        if not member.welcomed and method == "entered":
            return
        blocked = max(member.node.cut, member.muted_until)
        late = member.late_by() if member.late_by is not None and now < member.late_until else 0.0
        if blocked <= now and not late and not member.outbox:
            getattr(self.judge, method)(member.incarnation, *arguments, self.clock)
            return
        due = max(blocked, now + late, member.outbox[-1][0] if member.outbox else 0.0)
        member.outbox.append((due, method, arguments))

    def _deliver(self, member: Member) -> None:
        """Deliver the messages that have arrived; after a long cut, deliver a Hello and only the newest message."""
        now = self.now
        lost = max(member.node.cut, member.muted_until)
        if now < lost:
            return
        if member.outbox and now - member.outbox[0][0] < HEARTBEAT_S and len(member.outbox) > CONNECTION_KEEPS_S:
            newest = member.outbox[-1]
            member.outbox.clear()
            member.outbox.append(newest)
            member.welcomed = False
        if not member.welcomed:
            self._greets(member, self.gang(member.incarnation).rhythm_phase.phase)
        while member.outbox and member.outbox[0][0] <= now:
            _, method, arguments = member.outbox.popleft()
            getattr(self.judge, method)(member.incarnation, *arguments, self.clock)

    def later(self, at: float, what: Callable[[], None]) -> None:
        self._later.append((at, what))

    def ends(
        self, member: Member, code: int | None, signal: int | None, last_line: str, *, vanishes: bool = False
    ) -> None:
        """End the process of a member; if it ``vanishes``, there is no exit record."""
        member.ended = True
        member.end = ("vanish" if vanishes else "exit", code, signal, last_line)
        self._unreported_ends.append(member)

    def send_goodbye(self, member: Member) -> None:
        member.sent_goodbye = True
        if not self.is_deaf:
            self.judge.goodbye(member.incarnation, self.clock)

    def _report_ends(self) -> None:
        """Report ended processes to the judge.

        Exit records are on shared storage. Only the node's agent reports an end without a record.
        """
        for member in list(self._unreported_ends):
            if (
                self.members_by_incarnation.get(member.incarnation) is not member
                or member.end is None
                or member.node.excluded
            ):
                self._unreported_ends.remove(member)
                continue
            what, code, signal, last_line = member.end
            if member.gpus and self.died is not None:
                self.died(member)
            if self.now < member.node.cut and self.now < self.poll_at:
                continue
            if what == "exit":
                self.judge.exited(member.incarnation, code, signal, "exit record", last_line, self.clock)
            elif member.node.agent_is_running(self.now) and self.now >= member.node.cut:
                self.judge.gone(member.incarnation, self.clock)
            else:
                continue
            self._unreported_ends.remove(member)

    # ── the manager ──────────────────────────────────────────────────────────────────────────────────────────────────
    def goes_deaf(self, how: str, lasts: float) -> None:
        self.deaf_how, self.deaf_until = how, self.now + lasts
        self._stopped_at = self.clock

    def _resume_manager(self) -> None:
        how, self.deaf_how = self.deaf_how, ""
        if how == "paused":
            self.judge.paused(self.clock)
            return
        self.clock_ahead = max(self.wall_ahead, self._stopped_at - self.now)  # never before the previous manager's end
        current = [
            (one.incarnation, one.node.name)
            for gang in self.gangs.values()
            if gang.launch_at == inf
            for one in gang.members
        ]
        current += [(node.agent, node.name) for node in self.nodes.values() if not node.excluded]
        self.judge.restarted(current, self.clock, self.clock_ahead)
        for node in self.nodes.values():
            node.introduced = False
        for gang in self.gangs.values():
            for member in gang.members:
                member.outbox.clear()
                member.welcomed = False
                member.muted_until = max(member.muted_until, self.now + self.random.uniform(*_RECONNECT_S))
        self.poll_at = self.now

    def _poll_cluster(self) -> None:
        now = self.now
        if now < self.poll_at and not self.judge.wants_poll(self.clock):
            return
        self.poll_at = now + self.scenario.limits.poll
        if now >= self.cluster_away:
            states = {
                node.name: (node.state, node.detail, now < node.suspended)
                for node in self.nodes.values()
                if not node.excluded
            }
            self.judge.cluster(states, self.clock, self.clock)
