"""Compares latency and throughput of the same requests to the endpoint of a run and to vLLM's own server.

Both engines have the same model and arguments and run at the same time; only one of them has work at any moment. Rounds
alternate between the arms. The time of a turn covers all that the client waits for, from its call to the parsed answer.
The run's trainer is idle during the measurement, because no episode ends.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path

import openai
from msgspec import Struct, json

from rrl.benchmarks._agents_hold import FOLDER_ENV, HeldEpisode
from rrl.benchmarks._vllm_servers import MODEL, serving
from rrl.examples.smollm2 import make_model
from rrl.tests.support.runs import TestRun, all_work, submit_here

TURN_TOKENS = 64
AT_ONCE = 32
MAX_LENGTH = 512
ROUNDS = 6
SINGLE_TURNS = 6
"""Number of turns of a round with one call at a time."""
START_TIMEOUT_S = 900.0
RRL, DIRECT = "rrl", "vllm"
ARMS = (RRL, DIRECT)


class Turn(Struct, frozen=True):
    """One call of an arm, with its duration and the tokens of its answer."""

    arm: str
    round: int
    at_once: int
    seconds: float
    tokens: int


class Overhead(Struct, frozen=True):
    """The measurements: all calls, and the seconds of each round of concurrent calls."""

    turns: list[Turn]
    round_s: dict[str, list[float]]
    """Seconds of each round with :data:`AT_ONCE` concurrent calls, by arm."""
    load: tuple[float, float]
    """Load of this machine (1 minute) at the start and the end."""

    def p50(self, arm: str, at_once: int) -> float:
        """Return the median seconds of an arm's turns that have all :data:`TURN_TOKENS` tokens.

        ``at_once`` is the number of concurrent calls: 1 or :data:`AT_ONCE`.
        """
        return statistics.median(
            turn.seconds for turn in self.turns if (turn.arm, turn.at_once, turn.tokens) == (arm, at_once, TURN_TOKENS)
        )

    def added(self, at_once: int) -> float:
        """Return the endpoint's median time of a turn divided by that of vLLM's server, minus 1."""
        return self.p50(RRL, at_once) / self.p50(DIRECT, at_once) - 1

    def throughput(self, arm: str) -> float:
        """Return the tokens per second of the rounds with concurrent calls."""
        tokens = sum(turn.tokens for turn in self.turns if turn.arm == arm and turn.at_once == AT_ONCE)
        return tokens / sum(self.round_s[arm])


def measure(folder: Path, rounds: int = ROUNDS) -> Overhead:
    """Start rrl's endpoint and vLLM's server, and call them in turn."""
    model, episodes = make_model.FOLDER.expanduser(), folder / "episodes"
    episodes.mkdir(parents=True)
    with serving(model, folder, MAX_LENGTH, AT_ONCE) as (server,):
        run = submit_here(folder, job(model, episodes))
        try:
            held = _wait_held(run, episodes)
            direct = [HeldEpisode(server.base_url, "none")] * AT_ONCE
            return asyncio.run(_measure({RRL: held, DIRECT: direct}, rounds))
        finally:
            (episodes / "end").touch()
            with run.call("cancel", run.run.id) as process:
                process.wait(120)
            run.wait_gone(120)


def job(model: Path, episodes: Path) -> str:
    """Return the job.toml of a run that starts all its episodes at once; none of them ends."""
    return f"""
[run]
name = "overhead"
steps = 1
[cluster]
kind = "local"
spares = 0
node = {{ cpus = 2, mem = "8GiB" }}
[model]
path = "{model}"
chat = true
max_length = {MAX_LENGTH}
[task]
function = "rrl.benchmarks._agents_hold:make"
[sampling]
prompts_per_step = {AT_ONCE // 2}
group_size = 2
max_new_tokens = {TURN_TOKENS}
[roles.agents]
function = "rrl.benchmarks._agents_hold:run"
concurrency = {AT_ONCE}
timeout = "2h"
env = {{ {FOLDER_ENV} = "{episodes}" }}
[roles.trainer]
mem = "8GiB"
warm = false
snapshots = false
[roles.rollout]
engine = "vllm"
mem = "6GiB"
lease = {AT_ONCE}
[limits]
silence = "60s"
join = "600s"
"""


def _wait_held(run: TestRun, episodes: Path) -> list[HeldEpisode]:
    """Wait until all episodes are at work and the rollout has weights; return their keys."""
    run.wait(lambda state: all_work(state) and len(list(episodes.glob("*.json"))) >= AT_ONCE, START_TIMEOUT_S)
    files = sorted(episodes.glob("*.json"))[:AT_ONCE]
    return [json.decode(path.read_bytes(), type=HeldEpisode) for path in files]


async def _measure(held: dict[str, list[HeldEpisode]], rounds: int) -> Overhead:
    load = os.getloadavg()[0]
    clients = {
        arm: [openai.AsyncOpenAI(base_url=each.base_url, api_key=each.api_key, timeout=None) for each in episodes]
        for arm, episodes in held.items()
    }
    turns: list[Turn] = []
    round_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(-1, rounds):  # the first one warms up
        for arm in ARMS if number % 2 else ARMS[::-1]:
            single = [await _turn(arm, number, 1, clients[arm][0], index) for index in range(SINGLE_TURNS)]
            started = time.perf_counter()
            together = await asyncio.gather(
                *(
                    _turn(arm, number, AT_ONCE, client, SINGLE_TURNS + index)
                    for index, client in enumerate(clients[arm])
                )
            )
            if number >= 0:
                round_s[arm].append(round(time.perf_counter() - started, 4))
                turns += [*single, *together]
    for client in (client for several in clients.values() for client in several):
        await client.close()
    return Overhead(turns, round_s, (round(load, 1), round(os.getloadavg()[0], 1)))


async def _turn(arm: str, number: int, at_once: int, client: openai.AsyncOpenAI, index: int) -> Turn:
    """Send to an arm a request that differs from all earlier ones; return the turn with its duration."""
    question = f"Write a long story about the number {1000 * (number + 1) + index}."
    started = time.perf_counter()
    reply = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=TURN_TOKENS
    )
    seconds = time.perf_counter() - started
    assert reply.usage is not None
    return Turn(arm, number, at_once, round(seconds, 5), reply.usage.completion_tokens)
