from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from rrl.core.run_spec import AgentsSettings
from rrl.core.types import Incarnation, ReplicaId
from rrl.roles.agents.attempts import FAULTS_WINDOW, AgentContext, Attempts
from rrl.roles.agents.user_program import ProgramFailed
from rrl.roles.models.rewards import REWARD, Reward
from rrl.roles.trajectories.client import FencedAttempt, NoAnswer, WrongArgument
from rrl.roles.trajectories.episodes.requests import EpisodeItem, FailAttempt, FinishEpisode

DEADLINE_S = 60.0
"""Time limit in seconds, which only a broken build reaches."""
HERE = Path(__file__)
WHO = Incarnation(ReplicaId("agents/0"), 1)


def key_of(item: EpisodeItem) -> str:
    return f"key of attempt {item.attempt} at episode {item.episode}"


class RecordedResults:
    """A replacement for the store that records how attempts end."""

    def __init__(self) -> None:
        self.finished: list[tuple[int, int, Reward | None]] = []
        self.later: list[bool] = []
        self.failed: list[tuple[int, int, str]] = []
        self.fenced = False
        self.refuses = ""
        self.no_answer = False
        self.scored_failures: list[tuple[int, int, Reward | None]] = []

    async def __call__(self, kind: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        match kind(WHO, *arguments, **named):
            case FinishEpisode(_, episode, attempt, reward, _, True):
                if self.fenced:
                    raise FencedAttempt("a later attempt is made")
                if self.no_answer:
                    raise NoAnswer("the agent has no answer")
                self.scored_failures.append((episode, attempt, reward))
            case FinishEpisode(_, episode, attempt, reward, later):
                if self.fenced:
                    raise FencedAttempt("a later attempt is made")
                if self.refuses:
                    raise WrongArgument(self.refuses)
                self.finished.append((episode, attempt, reward))
                self.later.append(later)
            case FailAttempt(_, episode, attempt, why):
                if self.fenced:
                    raise FencedAttempt("the evaluation is over")
                self.failed.append((episode, attempt, why))


def item_text(item: int, evaluation: bool) -> str:
    return f"held-out {item}" if evaluation else f"item {item}"


def play(
    agent: Callable[[str, str, str], Awaitable[Any]],
    store: RecordedResults,
    episodes: int = 1,
    timeout: float = 1e3,
    reward_timeout: float | None = None,
    failed_reward: float | None = None,
) -> Attempts:
    """Make the first attempt at each of some episodes, one after the other, and return once all have ended."""
    settings = AgentsSettings("m:f", timeout=timeout, reward_timeout=reward_timeout, failed_reward=failed_reward)
    context = AgentContext(agent, settings, item_text, HERE.parent)

    async def main() -> Attempts:
        changed = asyncio.Event()
        attempts = Attempts(context, "http://b/v1", key_of, store, changed.set)
        for episode in range(episodes):
            attempts.start(EpisodeItem(episode, 0, 5, 1))
            attempts.start(EpisodeItem(episode, 0, 5, 1))  # repeated as after a lost answer
            async with asyncio.timeout(DEADLINE_S):
                while attempts.episodes:
                    await changed.wait()
                    changed.clear()
        return attempts

    return asyncio.run(main())


def test_an_agent_gets_item_url_and_key_and_its_reward_is_recorded_once() -> None:
    given: list[tuple[str, str, str]] = []

    async def agent(item: str, base_url: str, api_key: str) -> float:
        given.append((item, base_url, api_key))
        return 0.5

    store = RecordedResults()
    attempts = play(agent, store)
    assert given == [("item 5", "http://b/v1", "key of attempt 1 at episode 0")]
    assert (store.finished, store.failed, attempts.ended) == ([(0, 1, 0.5)], [], 1)


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (None, None),
        (True, 1.0),
        (2, 2.0),
        (numpy.float32(0.5), 0.5),
        (numpy.array(0.5), 0.5),
        ({"planner": 1, "*": numpy.float32(0.5)}, {"planner": 1.0, "*": 0.5}),
    ],
)
def test_returned_number_is_the_reward_and_none_leaves_the_reward_to_the_task(
    returned: object, reward: Reward | None
) -> None:
    async def agent(*_: str) -> object:
        return returned

    store = RecordedResults()
    play(agent, store)
    assert store.finished == [(0, 1, reward)]


@pytest.mark.parametrize("returned", [None, 0.5])
def test_an_episode_without_a_reward_waits_for_one_if_the_job_gives_it_time(returned: float | None) -> None:
    async def agent(*_: str) -> object:
        return returned

    scored, waits = RecordedResults(), RecordedResults()
    play(agent, scored)
    play(agent, waits, reward_timeout=60.0)
    assert (scored.later, waits.later) == ([False], [returned is None])


@pytest.mark.parametrize(
    "returned", ["much", "1", math.nan, math.inf, [1], 10**400, 1j, {}, {"a": None}, {1: 1.0}, {"\ud800": 1.0}]
)
def test_returned_value_other_than_a_finite_number_or_none_fails_the_attempt(returned: object) -> None:
    async def agent(*_: str) -> object:
        return returned

    store = RecordedResults()
    play(agent, store)
    assert store.finished == []
    assert f"return the reward, {REWARD}, or None" in store.failed[0][2]


def test_rewards_by_name_that_the_store_refuses_fail_the_attempt_as_a_fault_of_the_agent() -> None:
    async def agent(*_: str) -> object:
        return {"plannr": 1.0}

    store = RecordedResults()
    store.refuses = "the reward of episode 0 has ['plannr']"
    attempts = play(agent, store, episodes=1 + FAULTS_WINDOW // 2)
    assert store.finished == []
    assert store.failed[0] == (0, 1, store.refuses)
    assert isinstance(attempts.error, WrongArgument), "a misspelt name in every attempt does not end the process"


def test_exception_fails_the_attempt_with_its_place_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(*_: str) -> None:
        raise KeyError("tool")

    line = agent.__code__.co_firstlineno + 1
    store = RecordedResults()
    with caplog.at_level(logging.WARNING):
        attempts = play(agent, store, episodes=3)
    assert [why for _, _, why in store.failed] == [f"the agent raised KeyError: 'tool' ({HERE.name}:{line})"] * 3
    assert len(caplog.records) == 1
    assert "KeyError" in attempts.note
    assert attempts.error is None


def test_agent_beyond_its_timeout_fails_and_its_own_timeout_error_counts_as_an_exception() -> None:
    async def endless(*_: str) -> None:
        await asyncio.Event().wait()

    async def own(*_: str) -> None:
        raise TimeoutError("the tool is slow")

    store = RecordedResults()
    play(endless, store, timeout=0.01)
    play(own, store)
    assert "did not return within" in store.failed[0][2]
    assert "the agent raised TimeoutError: the tool is slow" in store.failed[1][2]


def test_agent_that_exits_or_cancels_itself_fails_only_its_own_attempt() -> None:
    async def exits(*_: str) -> None:
        raise SystemExit(3)

    async def cancels(*_: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def interrupts(*_: str) -> None:
        raise KeyboardInterrupt

    async def exits_in_a_tool(*_: str) -> None:
        await asyncio.gather(exits(), asyncio.sleep(0))

    store = RecordedResults()
    agents = {
        exits: "SystemExit",
        cancels: "CancelledError",
        interrupts: "KeyboardInterrupt",
        exits_in_a_tool: "SystemExit",
    }
    for number, (agent, name) in enumerate(agents.items()):
        attempts = play(agent, store)
        assert name in store.failed[number][2]
        assert (attempts.error, store.finished) == (None, [])


def test_returned_value_that_ends_the_program_fails_only_its_own_attempt() -> None:
    class Spoilt:
        def __float__(self) -> float:
            raise RuntimeError

        def __repr__(self) -> str:
            raise SystemExit

    async def agent(*_: str) -> object:
        return Spoilt()

    store = RecordedResults()
    assert play(agent, store).error is None
    assert f"return the reward, {REWARD}, or None" in store.failed[0][2]


def test_failures_of_attempts_that_the_store_has_ended_are_no_faults_of_the_agent() -> None:
    async def agent(item: str, base_url: str, api_key: str) -> float:
        raise RuntimeError("403: attempt_over")

    store = RecordedResults()
    store.fenced = True
    attempts = play(agent, store, episodes=2 * FAULTS_WINDOW)
    assert (attempts.error, attempts.note) == (None, "")


def test_fenced_attempt_ends_without_a_report() -> None:
    async def agent(*_: str) -> float:
        return 1.0

    store = RecordedResults()
    store.fenced = True
    attempts = play(agent, store)
    assert (attempts.error, attempts.ended, store.failed) == (None, 1, [])


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (KeyError("x"), True),
        (ConnectionError("gone"), False),
        (ProgramFailed("no", environmental=False), True),
        (ProgramFailed("gone", environmental=True), False),
    ],
)
def test_exception_of_most_attempts_ends_the_process_if_the_code_is_at_fault(error: Exception, ends: bool) -> None:
    async def agent(*_: str) -> None:
        raise error

    attempts = play(agent, RecordedResults(), episodes=FAULTS_WINDOW)
    assert attempts.error is (error if ends else None)


def test_cancelled_attempts_are_reported_nowhere() -> None:
    store = RecordedResults()

    async def agent(*_: str) -> None:
        await asyncio.Event().wait()

    async def main() -> Attempts:
        context = AgentContext(agent, AgentsSettings("m:f"), item_text, HERE.parent)
        attempts = Attempts(context, "http://b/v1", key_of, store, lambda: None)
        attempts.start(EpisodeItem(0, 0, 0, 1))
        await asyncio.sleep(0)
        await attempts.cancel()
        return attempts

    attempts = asyncio.run(main())
    assert (store.finished, store.failed, attempts.episodes, attempts.error) == ([], [], (), None)


# ── failed_reward ────────────────────────────────────────────────────────────────────────────────────────────────────
def raises(error: BaseException) -> Callable[[str, str, str], Awaitable[Any]]:
    async def agent(*_: str) -> float:
        raise error

    return agent


@pytest.mark.parametrize("error", [ValueError("cut answer"), ProgramFailed("codex ended with exit code 1", False)])
def test_attempt_that_its_own_code_ended_gets_the_jobs_reward_and_is_no_fault(error: Exception) -> None:
    store = RecordedResults()
    attempts = play(raises(error), store, FAULTS_WINDOW, failed_reward=-1.0)
    assert store.scored_failures == [(episode, 1, -1.0) for episode in range(FAULTS_WINDOW)]
    assert (store.failed, store.finished, attempts.error) == ([], [], None)
    assert str(error) in attempts.note


@pytest.mark.parametrize("error", [ConnectionResetError("proxy"), ProgramFailed("codex ended with signal 9", True)])
def test_attempt_that_something_outside_of_its_code_ended_is_never_scored(error: Exception) -> None:
    store = RecordedResults()
    play(raises(error), store, failed_reward=-1.0)
    assert (store.scored_failures, len(store.failed)) == ([], 1)


def test_attempt_that_takes_too_long_or_returns_no_reward_is_never_scored() -> None:
    async def waits(*_: str) -> float:
        await asyncio.sleep(DEADLINE_S)
        return 1.0

    async def returns(*_: str) -> str:
        return "much"

    store = RecordedResults()
    play(waits, store, timeout=0.01, failed_reward=-1.0)
    play(returns, store, failed_reward=-1.0)
    assert (store.scored_failures, len(store.failed)) == ([], 2)


def test_attempt_without_an_answer_fails_with_its_own_reason_and_counts_as_a_fault() -> None:
    store = RecordedResults()
    store.no_answer = True
    attempts = play(raises(ValueError("broken")), store, FAULTS_WINDOW, failed_reward=0.0)
    assert isinstance(attempts.error, ValueError)
    assert all("broken" in why for _, _, why in store.failed)


def test_failure_of_an_attempt_that_is_over_is_never_scored() -> None:
    store = RecordedResults()
    store.fenced = True
    play(raises(ValueError("broken")), store, failed_reward=0.0)
    assert (store.scored_failures, store.failed) == ([], [])
