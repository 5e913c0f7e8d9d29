"""``me.episodes()``: episodes that a program leases from a real store, in a thread of the test."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_dir import write_atomically
from rrl.core.run_spec import RunSpec
from rrl.core.types import Version
from rrl.roles.launcher.end_report import Misuse
from rrl.roles.models.rewards import REWARD
from rrl.roles.trajectories.client import Fenced
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import AttemptFailed, EpisodeFinished, decode
from rrl.roles.trajectories.steps.evaluations import EvaluationSettings
from rrl.roles.trajectories.store import Store
from rrl.roles.worker import episode_work
from rrl.roles.worker.api import Worker
from rrl.roles.worker.episode_work import Episode
from rrl.tests.support.listening_manager import TIMEOUT_S, eventually, lab
from rrl.tests.support.roles.trajectories.agents import AGENTS, CREW, evaluated, open_agents_store, sample
from rrl.tests.support.roles.trajectories.crew import ROLLOUT, TRAINER, incarnation_of, lease
from rrl.tests.support.roles.worker_scene import Manager, Scene
from rrl.transport.messages import Heartbeat

openai = pytest.importorskip("openai")

TASK = """
class Task:
    def __init__(self, seed):
        pass

    def prompt(self, i):
        return f"item {i}"

    def answer(self, i):
        return ""

    def score(self, i, text):
        return 0.0, 0.0
"""


def job(**agents: object) -> RunSpec:
    return resolve(
        Job.model_validate(
            {
                "run": {"name": "test", "steps": 1},
                "task": {"function": "task_of_test_episodes:Task"},
                "model": {"tokenizer": {"pieces": "0123456789?", "chat": {"user": "{content}"}}},
                "sampling": {"max_new_tokens": 4},
                "roles": {"agents": {"command": ["python", "player.py"], "per": "replica", **agents}},
                "transport": {"weights": "tcp"},
            }
        ),
        "python",
    )


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("RRL_HEARTBEAT_INTERVAL", "0.02")
    with lab(tmp_path) as at:
        (at.run.path / "task_of_test_episodes.py").write_text(TASK)
        yield Scene(at)


SUCCESSOR = incarnation_of("agents/0", 2)
_Record = TypeVar("_Record")
Program = Callable[[Worker, "queue.Queue[object]"], None]


class Played:
    """A program that plays episodes, as the test observes it: its store, and what it has reported."""

    def __init__(self, store: Store, manager: Manager) -> None:
        self.store, self._manager = store, manager
        self.reported: queue.Queue[object] = queue.Queue()

    async def tells(self) -> object:
        return await asyncio.to_thread(self.reported.get, timeout=TIMEOUT_S)

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return [message for message in self._manager.received if isinstance(message, Heartbeat)]

    async def in_phase(self, name: str) -> None:
        await eventually(lambda: any(one.phase == name for one in self.heartbeats), f"phase {name}")


def play_program(
    scene: Scene,
    program: Program,
    then: Callable[[Played], Awaitable[None]],
    evaluations: EvaluationSettings | None = None,
    **agents: object,
) -> None:
    """Run a program as agents/0 until ``then`` has returned, and then request its stop."""
    write_atomically(scene.at.run.run_spec, msgspec.json.encode(job(**agents)))

    async def story() -> None:
        store = open_agents_store(scene.at.run.store, evaluations=evaluations)
        store.report_versions(TRAINER, (Version(0, 1),))
        async with scene.manager_and(store) as manager:
            played, me = Played(store, manager), scene.worker(AGENTS)
            role = scene.start(me, lambda: program(me, played.reported))
            await then(played)
            await manager.stop(AGENTS)
            await role.end()

    asyncio.run(story())


def records(scene: Scene, kind: type[_Record]) -> list[_Record]:
    """Return the records of a kind in the store's log."""
    log = max(scene.at.run.store.glob("log.*"))
    return [record for record in map(decode, read_frames(log)) if isinstance(record, kind)]


def test_episode_has_url_and_key_for_a_client_and_its_reward_is_recorded(scene: Scene) -> None:
    def program(me: Worker, reported: queue.Queue[object]) -> None:
        for episode in me.episodes(at_most=1):
            client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
            try:
                reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
            except openai.APIConnectionError:  # the call of the second episode fails at the stop request
                reported.put(episode.fail("no answer"))
                continue
            reported.put((episode.item, episode.attempt, reply.choices[0].message.content, episode.finish(0.5)))
            with pytest.raises(Misuse) as refused:
                episode.finish(0.5)
            reported.put(str(refused.value))

    async def then(played: Played) -> None:
        (turn,) = await eventually(lambda: lease(played.store, ROLLOUT), "a turn")
        await played.in_phase("wait_turn")
        sample(played.store, turn.trajectory, [5, 1])
        assert await played.tells() == ("item 0", 1, "3", True)
        assert await played.tells() == "attempt 1 at episode 0 has already ended; call finish() or fail() only once"
        await eventually(lambda: played.heartbeats[-1].done >= 2, "progress: the turn, and the end of the episode")

    play_program(scene, program, then)
    assert not records(scene, AttemptFailed)
    assert [(one.episode, one.attempt, one.reward) for one in records(scene, EpisodeFinished)] == [(0, 1, 0.5)]


def test_concurrent_episodes_are_limited_and_a_failed_one_frees_its_place(scene: Scene) -> None:
    def program(me: Worker, reported: queue.Queue[object]) -> None:
        held: list[Episode] = []
        for episode in me.episodes(at_most=2):
            held.append(episode)
            reported.put([episode.attempt for episode in held])
            if len(held) == 2:
                reported.put(held[0].fail("the browser\ncrashed"))

    async def then(played: Played) -> None:
        assert [await played.tells() for _ in range(4)] == [[1], [1, 1], True, [1, 1, 2]]

    play_program(scene, program, then)
    (failed,) = records(scene, AttemptFailed)
    assert (failed.attempt, failed.failures, failed.reason) == (1, 1, "the browser crashed")


def test_item_whose_text_cannot_be_made_fails_its_attempts_only(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(item: int, evaluation: bool) -> str:
        return sys.exit() if item == 0 else f"item {item}"

    monkeypatch.setattr(episode_work, "load_episode_items", lambda *_: text)

    def program(me: Worker, reported: queue.Queue[object]) -> None:
        for episode in me.episodes(at_most=1):
            reported.put(episode.item)

    async def then(played: Played) -> None:
        assert await played.tells() == "item 10"

    play_program(scene, program, then, retries=0)


def test_program_learns_which_episodes_are_of_an_evaluation(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        episode_work, "load_episode_items", lambda *_: lambda item, evaluation: f"held-out: {evaluation}, {item}"
    )

    def program(me: Worker, reported: queue.Queue[object]) -> None:
        for episode in me.episodes(at_most=2):
            reported.put((episode.split, episode.item))

    async def then(played: Played) -> None:
        assert await played.tells() == ("eval", "held-out: True, 0")
        assert await played.tells() == ("train", "held-out: False, 0")

    play_program(scene, program, then, evaluated("own", samples=1, temperature=0.0, count=1)["evaluations"])


def test_attempt_beyond_its_time_limit_fails_and_its_later_end_is_ignored(scene: Scene) -> None:
    def program(me: Worker, reported: queue.Queue[object]) -> None:
        held: list[Episode] = []
        for episode in me.episodes(at_most=1):  # leased again once its first attempt has lasted too long
            held.append(episode)
            if len(held) == 2:
                reported.put([held[0].finish(1.0), held[1].attempt])

    async def then(played: Played) -> None:
        assert await played.tells() == [False, 2]

    play_program(scene, program, then, timeout="300ms")


def test_replaced_process_cannot_end_an_episode(scene: Scene) -> None:
    replaced = threading.Event()

    def program(me: Worker, reported: queue.Queue[object]) -> None:
        for episode in me.episodes(at_most=1):
            reported.put("begun")
            assert replaced.wait(TIMEOUT_S)
            with pytest.raises(Fenced):
                episode.finish(1.0)
            reported.put("fenced")
            return

    async def then(played: Played) -> None:
        assert await played.tells() == "begun"
        played.store.update_membership([SUCCESSOR if member == AGENTS else member for member in CREW])
        replaced.set()
        assert await played.tells() == "fenced"

    play_program(scene, program, then)
    assert not records(scene, EpisodeFinished)


@pytest.mark.parametrize(
    ("reward", "later", "problem"),
    [
        (float("nan"), False, f"the reward is nan; give {REWARD}, or None"),
        ("much", False, f"the reward is 'much'; give {REWARD}, or None"),
        ({"planner": None}, False, f"the reward is {{'planner': None}}; give {REWARD}, or None"),
        (1.0, True, "got a reward and later=True; give only one of them"),
    ],
)
def test_invalid_reward_is_one_line(scene: Scene, reward: float, later: bool, problem: str) -> None:
    def program(me: Worker, reported: queue.Queue[object]) -> None:
        for episode in me.episodes(at_most=1):
            with pytest.raises(Misuse) as refused:
                episode.finish(reward, later)
            reported.put(str(refused.value))

    async def then(played: Played) -> None:
        assert await played.tells() == f"finish(): {problem}"

    play_program(scene, program, then)


def test_episode_whose_rewards_by_name_are_refused_can_be_finished_with_others(scene: Scene) -> None:
    def program(me: Worker, reported: queue.Queue[object]) -> None:
        for episode in me.episodes(at_most=1):
            client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
            try:
                client.chat.completions.create(model="planner", messages=[{"role": "user", "content": "?"}])
            except openai.APIConnectionError:
                continue
            with pytest.raises(ValueError, match=r"has .'plannr'., .* but not .'planner'."):
                episode.finish({"plannr": 0.5})
            reported.put(episode.finish({"planner": 0.5}))

    async def then(played: Played) -> None:
        (turn,) = await eventually(lambda: lease(played.store, ROLLOUT), "a turn")
        sample(played.store, turn.trajectory, [5, 1])
        assert await played.tells() is True

    play_program(scene, program, then)
    assert [record.reward for record in records(scene, EpisodeFinished)] == [{"planner": 0.5}]
