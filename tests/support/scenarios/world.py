"""The simulated run: everybody beats once a second, events strike, and one judge hears all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from math import inf
from random import Random

from rrl.core.types import Life, NodeName, gang_of
from rrl.tests.support.scenarios.actors import (
    ASKS_STORE,
    COLLECTIVE,
    STARTING,
    STORE,
    Gang,
    Member,
    Node,
)  # fmt: skip
from rrl.tests.support.scenarios.format import Scenario
from rrl.tests.support.scenarios.hardware import gpus_of, uuid_of
from rrl.tests.support.scenarios.judge import Judge
from rrl.tests.support.scenarios.places import placed
from rrl.tests.support.scenarios.questions import Questions

BEAT = 1.0
"""s, as limits.beat is by default"""
LOADS_EVERY = 2
"""beats between two that tell loads"""
KEPT = 30.0
"""s that a cut connection keeps what was said; after a longer one whoever spoke says Hello again"""
_DIALS = (0.5, 3.0)
"""s until a worker has found the manager again"""
_TELLS = 0.25
"""s that a phase must last to be told by itself"""


class World:
    def __init__(self, name: str, scenario: Scenario, seed: int, judge: Judge) -> None:
        self.scenario, self.seed, self.judge = scenario, seed, judge
        self.name = name
        self.random = self.chance("world")
        self.now = 0.0
        self.nodes, self.gangs, self.spares = placed(scenario, seed, self.chance)
        self.deaf_until = 0.0
        """no manager, or one that stands still"""
        self.deaf_how = ""
        self.cluster_away = 0.0
        self.poll_at = 0.0
        self._gpus = gpus_of(scenario)
        self._questions = Questions(self.random)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.died: Callable[[Member], None] | None = None
        """called with each member whose end becomes known"""
        self._untold: list[Member] = []
        """whose end the manager has not learned yet"""
        self._ticks = 0
        self.living = {one.life: one for gang in self.gangs.values() for one in gang.members}
        for member in self.living.values():
            self._hand_out(member)

    def chance(self, what: str) -> Random:
        return Random(f"{self.name}:{self.seed}:{what}")

    # ── who is who ────────────────────────────────────────────────────────────────────────────────────────────────────
    def members(self, patterns: Iterable[str]) -> list[Member]:
        """Members of believed lives by their replica's name; a bare gang's name is its first member."""
        wanted = tuple(patterns)
        return [one for gang in self.gangs.values() for one in gang.members
                if any(fnmatchcase(one.life.replica, each) for each in wanted)]  # fmt: skip

    def nodes_of(self, patterns: Iterable[str]) -> list[Node]:
        found: dict[NodeName, Node] = {}
        for each in patterns:
            if each.startswith("@"):
                found.update({one.node.name: one.node for one in self.members([each[1:]])})
            else:
                found.update({name: node for name, node in self.nodes.items() if fnmatchcase(name, each)})
        return list(found.values())

    def gang(self, life: Life) -> Gang:
        return self.gangs[gang_of(life.replica)]

    def member(self, life: Life) -> Member | None:
        return self.living.get(life)

    # ── one second ───────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def deaf(self) -> bool:
        return self.now < self.deaf_until

    def tick(self) -> None:
        """Everything that happens within one beat, and what is heard of it."""
        self.now += BEAT
        self._ticks += 1
        if self.deaf_how and not self.deaf:
            self._hears_again()
        for due in [each for each in self._later if each[0] <= self.now]:
            self._later.remove(due)
            due[1]()
        if self._untold and not self.deaf:
            self._tell_ends()
        for node in self.nodes.values():
            self._agent_speaks(node)
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
        if not self.deaf:
            self._questions.ask(self.judge, self.living, self.now)
            self._ask_cluster()

    def _productive(self) -> dict[str, float]:
        """Role → the share of its replicas that work."""
        working: dict[str, list[bool]] = {}
        for gang in self.gangs.values():
            working.setdefault(gang.role, []).append(gang.productive(self.now))
        return {role: sum(each) / len(each) for role, each in working.items()}

    def _agent_speaks(self, node: Node) -> None:
        if node.excluded:
            return
        if node.state_until <= self.now:
            node.state, node.detail, node.state_until = "up", "", inf
        if self.deaf or not node.agent_speaks(self.now) or self.now < node.cut:
            return
        if not node.introduced:
            node.introduced = True
            self.judge.agent(node.name, node.agent, self.now, node.boot)
        else:
            self.judge.agent(node.name, node.agent, self.now)

    def _launch(self, gang: Gang) -> None:
        """Its next life, or its first."""
        gang.launch_at = inf
        gang.launched_at = self.now
        if gang.start_takes:
            takes, tell = gang.start_takes.pop(0)
            tell(gang.incarnation)
        else:
            takes = gang.table.starts.draw(gang.random)  # type: ignore[union-attr]
        gang.joins_at = self.now + takes
        for member in gang.members:
            self.living[member.life] = member
            if not member.held:
                self._hand_out(member)
            if not self.deaf:
                self.judge.launched(member.life, member.node.name, self.now)

    def _hand_out(self, member: Member) -> None:
        """GPUs of its node in order: the first that nobody has; where there are not enough, from the first on."""
        taken = {one for other in self.living.values() if other is not member and other.node is member.node
                 and not other.ended for one in other.held}  # fmt: skip
        free = [index for index in range(self._gpus) if index not in taken]
        enough = len(free) >= member.gpus
        member.held = tuple(free[: member.gpus]) if enough else tuple(range(min(member.gpus, self._gpus)))

    def used(self, node: NodeName) -> set[int]:
        """GPUs that somebody who has joined has there."""
        here = (one for gang in self.gangs.values() if gang.joined for one in gang.members if one.node.name == node)
        return {gpu for one in here if not one.ended for gpu in one.held}

    def _greets(self, member: Member, phase: str) -> None:
        member.welcomed = True
        self.judge.hello(member.life, member.node.name, phase, self.now)
        if member.held:
            self.judge.gpus(member.life, member.node.name, [uuid_of(member.node.name, gpu) for gpu in member.held])

    def _starts(self, gang: Gang) -> None:
        if gang.launch_at < inf:
            return
        for member in gang.members:
            if member.runs(self.now) and member.node.agent_speaks(self.now) and not self.deaf:
                self.judge.alive(member.life, self.now)
        if self.now >= gang.joins_at and all(member.works(self.now) for member in gang.members):
            gang.joined, gang.beat, gang.entered_at, gang.remaining = True, STARTING, self.now, BEAT
            gang.round, gang.passed = list(gang.table.once or ()), set()
            gang.work, gang.told = 0.0, 0

    def _goes_on(self, gang: Gang, stands: bool, works: dict[str, float]) -> None:
        now = self.now
        if self._can(gang, stands):
            share = works.get(gang.beat.waits, 1.0) if gang.beat.waits else 1.0
            gang.advance(now, BEAT, share)
            while gang.remaining <= 0 and gang.alive:
                if gang.beat.rate is None and gang.beat.phase == "publish":
                    gang.work += 1
                    gang.told = int(gang.work)
                gang.next_phase(now)
                if gang.remaining >= _TELLS:
                    for member in gang.members:
                        self._say(member, "entered", self._told(gang, member, False))
                    break
        elif any(now < member.lies for member in gang.members) and gang.beat.rate:
            gang.work += gang.beat.rate
            gang.told = int(gang.work)
        for member in gang.members:
            self._beats(gang, member, stands)

    def _can(self, gang: Gang, stands: bool) -> bool:
        if not gang.alive or (stands and gang.role != "trajectories" and gang.beat.phase in ASKS_STORE):
            return False
        if len(gang.members) == 1 or gang.beat.phase in COLLECTIVE or gang.beat.waits:
            return all(member.works(self.now) for member in gang.members)
        return True

    # ── what is said ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _told(self, gang: Gang, member: Member, stands: bool) -> tuple[object, ...]:
        return gang.beat.phase, gang.told, gang.says_waits_for(member, stands)

    def _beats(self, gang: Gang, member: Member, stands: bool) -> None:
        now = self.now
        if member.ended or not member.runs(now) or member.left:
            return
        if member.outbox or now < member.node.cut or now < member.mute or now < member.late_until or self.deaf:
            self._say(member, "beat", self._told(gang, member, stands))
            self._deliver(member)
        else:
            if not member.welcomed:
                self._greets(member, gang.beat.phase)
            phase, done, waits_for = self._told(gang, member, stands)
            self.judge.beat(member.life, phase, done, waits_for, now)  # type: ignore[arg-type]
        if self._ticks % LOADS_EVERY == 0 and now >= member.node.cut and not self.deaf:  # its agent tells them
            told = self.scenario.cluster.loads and member.node.agent_speaks(now)
            self.judge.load(member.life, gang.loads(member, now), member.gpus > 0, told, now)

    def _say(self, member: Member, what: str, told: tuple[object, ...]) -> None:
        """Something that a member says; it is on its way as long as the network, or a flood of lines, keeps it."""
        now = self.now
        if self.deaf or not member.runs(now):
            return
        if not member.welcomed and what == "entered":
            return
        blocked = max(member.node.cut, member.mute)
        late = member.late_by() if member.late_by is not None and now < member.late_until else 0.0
        if blocked <= now and not late and not member.outbox:
            getattr(self.judge, what)(member.life, *told, now)
            return
        due = max(blocked, now + late, member.outbox[-1][0] if member.outbox else 0.0)
        member.outbox.append((due, what, told))

    def _deliver(self, member: Member) -> None:
        """What has come through. After a long cut only the newest: it dials again, and says Hello first."""
        now = self.now
        lost = max(member.node.cut, member.mute)
        if now < lost:
            return
        if member.outbox and now - member.outbox[0][0] < BEAT and len(member.outbox) > KEPT:
            newest = member.outbox[-1]
            member.outbox.clear()
            member.outbox.append(newest)
            member.welcomed = False
        if not member.welcomed:
            self._greets(member, self.gang(member.life).beat.phase)
        while member.outbox and member.outbox[0][0] <= now:
            _, what, told = member.outbox.popleft()
            getattr(self.judge, what)(member.life, *told, now)

    def later(self, at: float, what: Callable[[], None]) -> None:
        self._later.append((at, what))

    def ends(self, member: Member, code: int | None, signal: int | None, said: str, *, vanishes: bool = False) -> None:
        """Its process is no more. ``vanishes``: without an exit record."""
        member.ended = True
        member.end = ("vanish" if vanishes else "exit", code, signal, said)
        self._untold.append(member)

    def says_goodbye(self, member: Member) -> None:
        member.left = True
        if not self.deaf:
            self.judge.goodbye(member.life, self.now)

    def _tell_ends(self) -> None:
        """Exit records lie on shared storage; that a process is gone without one only its node's agent can say."""
        for member in list(self._untold):
            if self.living.get(member.life) is not member or member.end is None or member.node.excluded:
                self._untold.remove(member)
                continue
            what, code, signal, said = member.end
            if member.gpus and self.died is not None:
                self.died(member)
            if self.now < member.node.cut and self.now < self.poll_at:
                continue
            if what == "exit":
                self.judge.exited(member.life, code, signal, "exit record", said, self.now)
            elif member.node.agent_speaks(self.now) and self.now >= member.node.cut:
                self.judge.gone(member.life, self.now)
            else:
                continue
            self._untold.remove(member)

    # ── the manager ──────────────────────────────────────────────────────────────────────────────────────────────────
    def goes_deaf(self, how: str, lasts: float) -> None:
        self.deaf_how, self.deaf_until = how, self.now + lasts

    def _hears_again(self) -> None:
        how, self.deaf_how = self.deaf_how, ""
        if how == "paused":
            self.judge.paused(self.now)
            return
        believed = [(one.life, one.node.name) for gang in self.gangs.values() if gang.launch_at == inf
                    for one in gang.members]  # fmt: skip
        believed += [(node.agent, node.name) for node in self.nodes.values() if not node.excluded]
        self.judge.restarted(believed, self.now)
        for node in self.nodes.values():
            node.introduced = False
        for gang in self.gangs.values():
            for member in gang.members:
                member.outbox.clear()
                member.welcomed = False
                member.mute = max(member.mute, self.now + self.random.uniform(*_DIALS))
        self.poll_at = self.now

    def _ask_cluster(self) -> None:
        now = self.now
        if now < self.poll_at and not self.judge.asks_cluster(now):
            return
        self.poll_at = now + self.scenario.limits.poll
        if now >= self.cluster_away:
            told = {node.name: (node.state, node.detail, now < node.suspended)
                    for node in self.nodes.values() if not node.excluded}  # fmt: skip
            self.judge.cluster(told, now, now)
