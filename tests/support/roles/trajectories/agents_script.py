"""Plays a run of agents with every kind of record of episodes, and checks that a store keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rrl.core.types import Incarnation
from rrl.roles.trajectories.durable.audit import Audit
from rrl.roles.trajectories.durable.records import (
    AttemptFailed,
    AttemptStarted,
    CallBlamed,
    EpisodeFinished,
    EpisodesCounted,
    TurnCreated,
    TurnEnded,
    TurnsNumbered,
    TurnTaken,
    TurnUnused,
)
from rrl.roles.trajectories.episodes.requests import (
    EndTurn,
    EpisodeItem,
    EpisodeTurns,
    FailAttempt,
    FinishEpisode,
    Follow,
    GetEpisode,
    LeasedEpisodes,
    LeaseEpisodes,
    MarkAnswer,
    OpenEpisode,
    OpenTurn,
    PostReward,
    StoreAnswer,
    StoreRequest,
    TurnOpened,
    TurnTokens,
)
from rrl.roles.trajectories.episodes.rules import EpisodeSettings
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import (
    Append,
    Commit,
    CommittedState,
    Denied,
    GetPart,
    LeaseWork,
    NotReady,
    PartBound,
    PostScores,
    Sampling,
    Score,
    Scoring,
)
from rrl.tests.support.roles.trajectories.agents import (
    AGENTS,
    CREW,
    OTHER_AGENTS,
    episodes,
    finish,
    open_agents_store,
    turn,
)
from rrl.tests.support.roles.trajectories.crew import (
    BATCH,
    GROUP,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    bind,
    commit,
    incarnation_of,
    manifest,
    score,
    segment,
)

EPISODE_RECORDS = {
    AttemptStarted,
    AttemptFailed,
    CallBlamed,
    TurnCreated,
    TurnTaken,
    TurnUnused,
    TurnEnded,
    TurnsNumbered,
    EpisodeFinished,
    EpisodesCounted,
}
"""Kinds of records that only a job with agents has."""
OUTSIDE = "outside"
"""Idempotency key with which the agent outside of the run requests its episode."""
NEXT_AGENTS = incarnation_of("agents/0", 2)
_SETTINGS = EpisodeSettings(retries=1)


class View(Struct, frozen=True):
    """All that a store returns about its episodes, and its counters."""

    episodes: tuple[StoreAnswer, ...]
    committed: CommittedState | Denied
    audit: Audit


def view_of(store: Store) -> View:
    audit = store.audit()
    shown = tuple(answer(store, GetEpisode(OTHER_AGENTS, number)) for number in range(audit.made))
    return View(shown, store.committed(TRAINER), audit)


class AgentsScript:
    """A run of the store.

    ``calls[i]`` is the request that changed ``views[i]`` to ``views[i + 1]``; None if a change of the membership did.
    """

    def __init__(self, folder: Path, noted: Callable[[int], None] = lambda _: None, **changed: Any) -> None:
        self.folder = folder
        self._noted = noted
        self.members: list[tuple[Incarnation, ...]] = [CREW]
        self.calls: list[tuple[StoreRequest, StoreAnswer] | None] = []
        self.store = open_agents_store(folder, episodes=_SETTINGS, **changed)
        self.store.flush()
        self.views = [view_of(self.store)]
        self._agents = AGENTS

    def _note(self, call: tuple[StoreRequest, StoreAnswer] | None, members: tuple[Incarnation, ...]) -> None:
        self.store.flush()
        self.calls.append(call)
        self.members.append(members)
        self.views.append(view_of(self.store))
        self._noted(len(self.views) - 1)

    def _call(self, request: StoreRequest) -> Any:
        given = answer(self.store, request)
        assert not isinstance(given, Denied | NotReady), (request, given)
        self._note((request, given), self.members[-1])
        return given

    def run(self, steps: int) -> None:
        for number in range(1, steps + 1):
            self._step(number)

    def _step(self, number: int) -> None:
        pending = self._lease(self._agents, 2) + self._lease(OTHER_AGENTS, 2)
        if number == 1:  # one attempt fails, and is repeated on another replica
            self._turns(pending[0], number)
            self._fail(pending[0])
            pending[0] = self._lease(OTHER_AGENTS, 1)[0]
        if number == 2:  # a replica ends in the middle of its attempts
            self._turns(pending[0], number)
            self._turns(pending[1], number)
            self._call(GetEpisode(AGENTS, pending[0].episode, (), "prepared"))
            members = (*(each for each in CREW if each != AGENTS), NEXT_AGENTS)
            self.store.update_membership(members)
            self._note(None, members)
            self._agents = NEXT_AGENTS
            pending[:2] = self._lease(NEXT_AGENTS, 2)
        if number == 3:  # an episode fails too often: its group is dropped
            group = pending[0].group
            for _ in range(2):
                self._fail(pending[0])
                leased = self._lease(self._agents, 1)
                pending[0] = leased[0]
            pending = [item for item in pending if item.group != group] + self._lease(OTHER_AGENTS, GROUP - 1)
        if number == 4:  # an agent outside of the run finishes an episode; its reward arrives later
            self._fail(pending[0])
            leased = self._call(OpenEpisode(OTHER_AGENTS, OUTSIDE))
            assert isinstance(leased, LeasedEpisodes)
            pending[0] = leased.items[0]
        for place, item in enumerate(pending):
            self._turns(item, number)
            later = number == 4 and place == 0
            reward = (None, {"planner": number / 8, "*": 0.5}, number / 8, {"coder": number / 8})[place]
            self._call(FinishEpisode(self._of(item), item.episode, item.attempt, reward, later))
            if later:
                self._call(PostReward(OTHER_AGENTS, item.episode, item.attempt, {"coder": 0.75}))
        self._score()
        bound = self._call(GetPart(TRAINER, number))
        assert isinstance(bound, PartBound)
        self._call(Commit(TRAINER, number, manifest(number), bound.part.digest))

    def _of(self, item: EpisodeItem) -> Incarnation:
        track = self.store._state.trajectories[item.episode].episode
        assert track is not None
        assert track.holder is not None
        return track.holder

    def _lease(self, who: Incarnation, at_most: int) -> list[EpisodeItem]:
        held = tuple(sorted(self.store.episodes._leases.leased_to(who)))
        leased = self._call(LeaseEpisodes(who, at_most, holding=held))
        assert isinstance(leased, LeasedEpisodes)
        assert len(leased.items) == at_most
        return list(leased.items)

    def _fail(self, item: EpisodeItem) -> None:
        self._call(FailAttempt(self._of(item), item.episode, item.attempt, "broken tool"))

    def _turns(self, item: EpisodeItem, step: int) -> None:
        """Make two turns in each episode.

        Odd episodes also get a branch, an incomplete turn, a turn that is cut, a foreign and an unused turn.
        """
        first = self._turn(item, "first", None, 0, (5, 6), step)
        self._turn(item, "second", first, 4, (8,), step)
        if item.episode % 2:
            self._turn(item, "branch", first, 3, (9, 1), step)
            self._turn(item, "left", first, 4, (9,), step, ends=False)
            if item.attempt == 1:
                cut = self._turn(item, "cut", first, 4, (9, 5, 6), step, ends=False)
                self._call(EndTurn(self._of(item), cut, 2))
            unused = self._turn(item, "unused", first, 4, (6, 1), step)
            self._call(MarkAnswer(self._of(item), unused, delivered=True, repeated=True))
            self._turn(item, "foreign", first, 4, (4, 1), step, sampling=Sampling(temperature=0.5))

    def _turn(
        self,
        item: EpisodeItem,
        request: str,
        parent: int | None,
        offset: int,
        tokens: tuple[int, ...],
        step: int,
        ends: bool = True,
        sampling: Sampling | None = None,
    ) -> int:
        who = self._of(item)
        agent = "planner" if request == "first" else "coder"
        opened = self._call(
            OpenTurn(who, item.episode, item.attempt, request, parent, offset, (2, 3), 4, "hash", "{}", sampling, agent)
        )
        assert isinstance(opened, TurnOpened)
        rollout = OTHER if item.episode % 2 else ROLLOUT
        answer(self.store, LeaseWork(rollout, 9))
        self._call(Append(rollout, (segment(opened.turn, 0, tokens, step - 1),), (opened.turn,) if ends else ()))
        read = answer(self.store, Follow(who, opened.turn, 0))
        assert isinstance(read, TurnTokens)
        assert read.tokens == tokens
        return opened.turn

    def _score(self) -> None:
        leased = self.store.lease_scoring(REWARD, 9)
        assert isinstance(leased, Scoring)
        self._call(PostScores(REWARD, tuple(Score(item.trajectory, 0.5, 0.25) for item in leased.items)))


def check(
    folder: Path,
    views: Sequence[View],
    members: Sequence[Incarnation],
    to: int,
    repeated: Sequence[tuple[StoreRequest, StoreAnswer] | None] = (),
    **changed: Any,
) -> None:
    """Check that a store that opens ``folder`` shows each episode as one of ``views``.

    ``views`` are the last acknowledged view and the next one, of which a crash may leave only the first records. The
    store must answer the ``repeated`` requests as before, and continue to step ``to`` without losing an episode or
    training it twice.
    """
    store = open_agents_store(folder, members, episodes=_SETTINGS, **changed)
    view = view_of(store)
    assert view.committed in [each.committed for each in views]
    least, most = views[0].audit.episodes, views[-1].audit.episodes
    assert all(least.get(name, 0) <= count <= most.get(name, 0) for name, count in view.audit.episodes.items())
    assert view.audit.episodes.get("token_drift", 0) == 0
    assert len(view.episodes) in range(len(views[0].episodes), len(views[-1].episodes) + 1)
    for number, shown in enumerate(view.episodes):
        new = [EpisodeTurns(0, ())] if number >= len(views[0].episodes) else []
        assert shown in [*new, *(each.episodes[number] for each in views if number < len(each.episodes))]
    for call in repeated:
        if call is None:
            continue
        request, given = call
        if isinstance(given, LeasedEpisodes) and call is not repeated[-1]:
            continue  # the last call may have changed which episodes can be leased
        again = answer(store, request)
        if isinstance(again, Denied) and (again.fenced_attempt or again.lost):  # the attempt is over
            last = repeated[-1]
            ends = FailAttempt | FinishEpisode | EndTurn
            assert last is None or isinstance(request, FailAttempt) or isinstance(last[0], ends)
            continue
        if isinstance(given, EpisodeTurns) and isinstance(again, EpisodeTurns) and repeated[-1] is None:
            # The end of the attempt's replica may be recorded, and the change of members not yet be known.
            again = replace(again, turns=again.turns + again.recorded, recorded=())
        fenced = isinstance(again, Denied) and again.fenced and request.incarnation not in members
        assert again == given or fenced, (request, again)
    start = store.committed(TRAINER)
    assert isinstance(start, CommittedState)
    for number in range((start.number or 0) + 1, to + 1):
        for who in (each for each in members if each.replica.startswith("agents/")):
            outside = answer(store, OpenEpisode(who, OUTSIDE))
            assert isinstance(outside, LeasedEpisodes)
            for item in (*outside.items, *episodes(store, 9, who)):
                turn(store, item, (7,), (5, 1), step=number - 1, who=who)
                finish(store, item, -1.0, who)
        for track in list(store._state.trajectories.values()):
            if track.episode is not None and track.episode.awaits_reward and track.score is None:
                answer(store, PostReward(OTHER_AGENTS, track.id, track.episode.attempt, 0.75))
        score(store)
        commit(store, bind(store, number))
    audit = store.audit()
    store.close()
    groups = [group for number in sorted(audit.steps) for group in audit.steps[number]]
    assert len(set(groups)) == len(groups)
    assert audit.made == audit.trained + sum(audit.dropped.values()) + audit.open
    assert audit.trained == to * BATCH * GROUP
    assert audit.dropped.items() >= views[0].audit.dropped.items()
