"""A run for the clients: the real store, the real endpoint, and a rollout whose answers come from a script.

The model is a folder with a chat template and tools (tests/support/roles/endpoint/tool_folders.py), without weights.
Its script gives the text of the answer for each context. Whatever the client, an episode is played as a ``command`` of
``[roles.agents]`` plays it, by the product's own code: the client's process gets its address and key by environment
variables, and prints the reward.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from rrl.benchmarks._clients_proxy import Recorder
from rrl.core.run_spec import ModelSpec
from rrl.roles.agents.user_program import ProgramFailed, program_agent
from rrl.roles.endpoint.application import Endpoint, ServedRun
from rrl.roles.endpoint.calls.call import Policy
from rrl.roles.endpoint.http_server import EndpointServer
from rrl.roles.endpoint.key import EpisodeKey, encode_key
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import ModelChat
from rrl.roles.trajectories.batches import decode
from rrl.roles.trajectories.episodes.requests import EpisodeItem, EpisodeTurns, GetEpisode, Turn
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.types import Done, Item, PartBound, PathDigest, Trajectory
from rrl.tests.support.roles.endpoint.served import RUN, SECRET
from rrl.tests.support.roles.endpoint.store_turns import StoreInProcess
from rrl.tests.support.roles.endpoint.tool_folders import END, make
from rrl.tests.support.roles.trajectories.agents import AGENTS, CREW, OTHER_AGENTS, episodes, finish, open_agents_store
from rrl.tests.support.roles.trajectories.crew import ROLLOUT, TRAINER, lease, segment

MAX_NEW, MAX_LENGTH = 4000, 400_000
"""Limits of an answer and of a context; one character is about one token of this tokenizer, and clients send 55 kB."""
TIMEOUT_S = 300.0
ANSWER = "<|im_start|>assistant\n"
"""Text before each answer in a context."""

Script = Callable[[str, int], str]
"""Returns the text of the answer to a context that contains this number of answers."""


def in_turn(answers: Sequence[str]) -> Script:
    """Return a script that gives the next answer after each answer in the context, and repeats the last one."""
    return lambda _, number: answers[min(number, len(answers) - 1)]


def scripted_answer(chat: ModelChat, script: Script, context: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of the script's answer to a context."""
    encode = chat.tokenizer.encode
    opening = array("I", encode(ANSWER)).tobytes()
    answered = array("I", context).tobytes().count(opening) - 1
    text = script(chat.tokenizer.decode(context), answered)
    # "12" is sampled as two tokens, but encoded as one: a client's text that is encoded again has other tokens
    return tuple(token for part in (*text.replace("12", "1|2").split("|"), END) for token in encode(part))


class Sampled(Struct, frozen=True):
    """What the rollout has sampled for a turn."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]


class ScriptedRollout:
    """A thread that answers every turn of a store by a script.

    Args:
        served: The store.
        chat: The model.
        script: The script.
        piece: Number of tokens that are appended at once, to each turn.
        pause: Seconds between two appends.
    """

    def __init__(
        self, served: StoreInProcess, chat: ModelChat, script: Script, piece: int = MAX_NEW, pause: float = 0.002
    ) -> None:
        self._served, self._chat, self._script, self._piece, self.pause = served, chat, script, piece, pause
        self.sampled: dict[int, Sampled] = {}
        """All that was sampled, by turn."""
        self._open: dict[int, tuple[PathDigest, tuple[int, ...], int]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.pause):
            with self._served.lock:
                for item in lease(self._served.store, holding=tuple(self._open)):
                    self._begin(item)
                for turn in list(self._open):
                    self._append(turn)
                self._served.store.flush()

    def _begin(self, item: Item) -> None:
        digest = PathDigest()
        digest.add(item.prompt)
        answer = scripted_answer(self._chat, self._script, item.prompt)
        self._open[item.trajectory] = digest, answer[: item.max_new], 0
        self.sampled[item.trajectory] = Sampled(tuple(item.prompt), ())

    def _append(self, turn: int) -> None:
        digest, tokens, offset = self._open[turn]
        new = tokens[offset : offset + self._piece]
        digest.add(new)
        done = (turn,) if offset + len(new) == len(tokens) else ()
        part = segment(turn, offset, new)
        grown = self._served.store.append(ROLLOUT, [type(part)(*_fields(part, digest.value()))], done)
        assert isinstance(grown, Done), grown
        had = self.sampled[turn]
        self.sampled[turn] = Sampled(had.context, had.tokens + new)
        self._open[turn] = digest, tokens, offset + len(new)
        if done:
            del self._open[turn]


def _fields(part: Any, digest: bytes) -> tuple[Any, ...]:
    return part.trajectory, part.offset, part.tokens, part.logprobs, part.version, digest


class Played(Struct, frozen=True):
    """An episode of a client."""

    reward: float | None
    error: str
    """Why the attempt failed; empty if it did not."""
    turns: tuple[Turn, ...]
    samples: tuple[Trajectory, ...]
    """What a trainer gets of the episode; empty if the attempt failed."""
    sampled: dict[int, Sampled]
    """What the rollout has sampled, by turn."""
    drift: int
    """Number of trained tokens that the store's own audit found to differ from what was sampled."""

    @property
    def branches(self) -> int:
        return len(self.samples)

    def reencoded_tokens(self) -> int:
        """Return how many tokens of earlier turns are encoded again in later ones, if the conversation is linear."""
        paths = {turn.id: self.sampled[turn.id].context + turn.sampled for turn in self.turns}
        lost = 0
        for before, turn in zip(self.turns, self.turns[1:], strict=False):
            kept = turn.offset if turn.parent == before.id else common_length(paths[before.id], paths[turn.id])
            lost += max(0, len(paths[before.id]) - kept)
        return lost

    def token_drift(self) -> int:
        """Return the number of trained tokens that the rollout did not sample after the same tokens."""
        known = {
            (each.context + each.tokens[:end], token)
            for each in self.sampled.values()
            for end, token in enumerate(each.tokens)
        }
        return self.drift + sum(
            (sample.prompt + tuple(sample.tokens[:place]), sample.tokens[place]) not in known
            for sample in self.samples
            for place in trained_places(sample)
        )

    def trained_share(self) -> float:
        """Return the share of the sampled tokens that is trained."""
        sampled = sum(len(each.tokens) for each in self.sampled.values())
        return sum(len(trained_places(sample)) for sample in self.samples) / max(1, sampled)


def trained_places(sample: Trajectory) -> list[int]:
    """Return the places of the tokens of a sample that are trained."""
    masked = {place for start, count in sample.masked for place in range(start, start + count)}
    return [place for place in range(len(sample.tokens)) if place not in masked]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that both sequences share."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


class ScriptedRun:
    """A store with one episode, a rollout with a script, and an endpoint.

    Args:
        folder: An empty folder.
        script: The script of the rollout.
        policy: The endpoint's settings.
        options: Options of the rollout.
    """

    def __init__(self, folder: Path, script: Script, policy: Policy = Policy(1.0), **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.chat = open_chat(ModelSpec(str(make(folder / "model")), chat=True))
        settings: dict[str, Any] = {"group_size": 1, "groups_per_batch": 1, "max_new_tokens": MAX_NEW}
        self.store = open_agents_store(folder / "store", **settings)
        self.who = AGENTS
        self.served = StoreInProcess(self.store, AGENTS)
        self.rollout = ScriptedRollout(self.served, self.chat, script, **options)
        self._policy = policy
        self._servers: list[EndpointServer] = []
        self.recorders: list[Recorder] = []
        self.server = self.serve()

    def serve(self) -> EndpointServer:
        """Serve a further endpoint, of the replica that works at present."""
        turns = StoreInProcess(self.store, self.who)
        turns.lock = self.served.lock
        served = ServedRun(RUN, SECRET, self._policy, MAX_NEW, MAX_LENGTH)
        recorder = Recorder(Endpoint(served, self.chat, turns).application)
        self.recorders.append(recorder)
        server = EndpointServer(recorder)  # type: ignore[arg-type]
        server.start()
        self._servers.append(server)
        return server

    def lease(self) -> EpisodeItem:
        with self.served.lock:
            return episodes(self.store, 1, self.who)[0]

    def key(self, item: EpisodeItem) -> str:
        return encode_key(EpisodeKey(RUN, item.episode, item.attempt), SECRET)

    def die(self) -> None:
        """End the replica of the agents; another one makes the next attempt, with an endpoint of its own."""
        with self.served.lock:
            self.store.update_membership([member for member in CREW if member != AGENTS])
        self.who = OTHER_AGENTS
        self.server = self.serve()

    def turns(self, item: EpisodeItem) -> tuple[Turn, ...]:
        with self.served.lock:
            shown = answer(self.store, GetEpisode(self.who, item.episode))
        assert isinstance(shown, EpisodeTurns), shown
        return shown.turns

    def play(
        self, command: Sequence[str], base_url: str = "", kill_at: int | None = None, **environment: str
    ) -> Played:
        """Let a client play the episode, and train the episode if the client has printed a reward.

        Args:
            command: The client.
            base_url: Another address of the endpoint.
            kill_at: Number of the turn in which the process of the client is killed; None for none.
            environment: Further environment variables.
        """
        item = self.lease()
        command = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        agent = program_agent(command, self.folder, lambda _: self.folder / "codex")
        attempt = agent("", base_url or self.server.base_url, self.key(item))
        reward, error = asyncio.run(self._attempt(attempt, kill_at))
        turns = self.turns(item)
        samples: tuple[Trajectory, ...] = ()
        with self.served.lock:
            if not error and turns:
                finish(self.store, item, reward or 0.0, self.who)
                bound = self.store.part(TRAINER, 1)  # not ready if nothing of the episode may be trained
                samples = tuple(decode(bound.part).trajectories) if isinstance(bound, PartBound) else ()
            drift = int(self.store.audit().episodes.get("token_drift", 0))
        return Played(reward, error, turns, samples, dict(self.rollout.sampled), drift)

    async def _attempt(self, agent: Awaitable[Any], kill_at: int | None) -> tuple[float | None, str]:
        """Return the reward, and why the attempt failed."""
        attempt = asyncio.ensure_future(agent)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while kill_at is not None and len(self.rollout.sampled) < kill_at and not attempt.done():
                    await asyncio.sleep(0.001)
                if kill_at is not None:
                    attempt.cancel()
                return await attempt, ""
        except (ProgramFailed, TimeoutError, asyncio.CancelledError) as failed:
            return None, str(failed) or type(failed).__name__

    def close(self) -> None:
        for server in self._servers:
            server.stop()
        self.rollout.stop()
        self.store.close()


@contextmanager
def scripted_run(folder: Path, script: Script, policy: Policy = Policy(1.0), **options: Any) -> Iterator[ScriptedRun]:
    """Open a :class:`ScriptedRun`, and close it at the end of the block."""
    run = ScriptedRun(folder, script, policy, **options)
    try:
        yield run
    finally:
        run.close()
