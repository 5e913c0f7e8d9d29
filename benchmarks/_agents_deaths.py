"""Whole runs in which 32 agents work while each kind of process dies several times.

The model is tiny and built by rrl, because the results do not depend on its answers. Agents, client, endpoint, store
and roles are real. The rows of the table:

- ``rollout``, ``store``, ``trainer``, ``manager``: this process is killed, while new weights arrive at every step.
- ``node``: all processes on the node of a rollout are killed at once, its agent included, and the node stays down.
- ``agents``: the step of the agents is killed, and its episodes are replayed.
- ``endpoint``: the endpoint of the run is killed. Some agents call it from outside through the relay, with streams.
  Others call it without the relay, and their client repeats a failed call up to :data:`OUTSIDE_RETRIES` times.
- ``tool``: the tool of an agent fails. Then the agent's attempt fails as well, and is repeated.
- ``old key``: the key of an attempt whose process has died is used again, as by an agent that was suspended and
  continues.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import openai
from msgspec import Struct

from rrl.benchmarks import _recorded
from rrl.benchmarks._agents_learning import MANAGER, joined, kill
from rrl.benchmarks._agents_watched import FOLDER_ENV, FORMS_ENV, MODEL, TOOL_GONE, WatchedCall, read_calls
from rrl.benchmarks._vllm_servers import free_port
from rrl.core.run_dir import RUNS_ENV
from rrl.core.types import TRAINER, ReplicaId
from rrl.roles.endpoint.key import EpisodeKey, decode_key, run_key
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import (
    AttemptFailed,
    EpisodeFinished,
    Record,
    SegmentsAppended,
    TurnCreated,
    TurnTaken,
    decode,
)
from rrl.tests.support.local_cluster import crash
from rrl.tests.support.roles.trainer.replayed import keep_logs
from rrl.tests.support.runs import RRL, TestRun, all_work, submit_here
from rrl.tests.support.soak import ManagerRestarter
from rrl.transport.keys import RunKeys

AT_ONCE = 32
OUTSIDE_AT_ONCE = 8
"""Number of concurrent episodes of the agents that call through the relay, and also of those that call without it."""
OUTSIDE_RETRIES = 20
"""How often the client of an agent without a relay repeats a call, with at most 8 s between two attempts. The client's
default of 2 repetitions covers only 2 s, but on a busy machine the endpoint may need longer to start again."""
TIMES = 10
WAIT_TIMEOUT_S = 600.0
ROWS = {
    "rollout": ReplicaId("rollout/0"),
    "node": ReplicaId("rollout/1"),
    "store": ReplicaId("trajectories/0"),
    "trainer": TRAINER,
    "manager": MANAGER,
    "agents": ReplicaId("agents/0"),
    "endpoint": ReplicaId("endpoint/0"),
    "tool": None,
    "old key": None,
}
"""The replica that each row kills; None if the row kills no replica. The row ``node`` kills all processes on its
node."""
_PIECES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class Deaths(Struct, frozen=True):
    """The failures that agents have observed, and counts from the store's log."""

    times: dict[str, int]
    """How often the failure of each row was caused."""
    calls: int
    client_errors: int
    """Number of failed calls that an agent's client did not repeat any more."""
    errors: list[str]
    old_keys_refused: int
    """Number of calls with the key of a dead attempt that the endpoint refused by HTTP status 403."""
    tool_failures: int
    """Number of attempts that failed because the agent's tool had failed."""
    resampled_tokens: int
    """Number of tokens that were sampled again for a call, although an earlier attempt, whose process died, had
    already got tokens for this call."""
    changed_tokens: int
    """Number of tokens in complete answers to agents for which no engine has recorded the same prompt and answer."""
    recorded_turns: int
    """Number of turns that were recorded in attempts whose process died. Only episodes that a later attempt has
    finished count."""
    replayed_share: float
    """Share of the ``recorded_turns`` that the next attempt has taken over instead of sampling them again."""
    episodes: int
    load: tuple[float, float]


def measure(
    folder: Path, times: int = TIMES, rows: Sequence[str] = tuple(ROWS), forms: Sequence[str] = ("chat",)
) -> Deaths:
    """Cause the failure of each row ``times`` times, in turn, while agents make calls in these forms."""
    load = os.getloadavg()[0]
    for name in ("record", "calls", "logs"):
        (folder / name).mkdir(parents=True)
    outside = "endpoint" in rows
    run = submit_here(folder, job(folder, outside=outside, forms=forms))
    run.wait(all_work, WAIT_TIMEOUT_S)
    restarter, done = ManagerRestarter(run), Counter[str]()
    refused = 0
    with _keeping_logs(run, folder / "logs"):
        try:
            with _agents_outside(run, folder, forms) if outside else _nobody():
                for _ in range(times):
                    for row in rows:
                        refused += _do(row, run, folder / "calls")
                        done[row] += 1
                        run.wait(all_work, WAIT_TIMEOUT_S)
                _wait_finished(run, folder / "calls")
        finally:
            with run.call("cancel", run.run.id) as process:
                process.wait(120)
            run.wait_gone(120)
            restarter.close()
    return _read(run, folder, dict(done), refused, load)


def job(folder: Path, *, outside: bool, forms: Sequence[str] = ("chat",)) -> str:
    """Return the job.toml of the run."""

    def command(role: str) -> str:
        return json.dumps([sys.executable, "-m", "rrl.benchmarks._recorded", role, "--record", str(folder / "record")])

    endpoint = f"[roles.endpoint]\nport = {free_port()}\n" if outside else ""
    return f"""
[run]
name = "deaths"
steps = 1_000_000
[cluster]
kind = "local"
spares = 1
node = {{ cpus = 4, mem = "4GiB" }}
[model]
max_length = 512
tokenizer = {{ pieces = "{_PIECES}", chat = {{ user = "{{content}}" }} }}
[task]
function = "rrl.benchmarks._agents_hold:make"
[sampling]
prompts_per_step = 8
group_size = 4
max_new_tokens = 64
[roles.agents]
function = "rrl.benchmarks._agents_watched:run"
concurrency = {AT_ONCE}
env = {{ {FOLDER_ENV} = "{folder / "calls"}", {FORMS_ENV} = "{",".join(forms)}" }}
{endpoint}
[roles.trainer]
command = {command("trainer")}
[roles.rollout]
command = {command("rollout")}
replicas = 2
lease = {AT_ONCE}
segment_tokens = 4
[limits]
silence = "30s"
[recovery]
backoff = "0s"
per_node = 1000
per_replica = 1000
breaker = 1.0
"""


def _do(row: str, run: TestRun, calls: Path) -> int:
    """Cause the failure of a row; return how many calls with an old key were refused (0 except in ``old key``)."""
    if row == "tool":
        (calls / TOOL_GONE).touch()
        run.wait(lambda _: not (calls / TOOL_GONE).exists(), WAIT_TIMEOUT_S)
        return 0
    if row == "old key":
        return _use_old_key(run, calls)
    target = ROWS[row]
    assert target is not None
    if row == "node":
        _crash_node(run, ReplicaId(target))
    else:
        # two deaths of a trainer without a step between them look like a fault of its software
        kill(run, target, run.state().step + 1 if target == TRAINER else 0)
    return 0


def _crash_node(run: TestRun, target: ReplicaId) -> None:
    """Kill all processes on the node of a replica, and wait until the replica works on another node."""
    replica = run.state().replica(target)
    assert replica.node is not None
    crash(run.run, replica.node)
    following = replica.incarnation_number + 1
    run.wait(lambda state: joined(state, target, following), WAIT_TIMEOUT_S)


def _use_old_key(run: TestRun, calls: Path) -> int:
    """Call with the key of an attempt that is over; return 1 if the call is refused by HTTP status 403, else 0."""
    answered = [call for call in read_calls(calls) if not call.error]
    attempts = {(key.episode, key.attempt): call for call in answered if (key := _key(run, call)) is not None}
    newest = max((episode for episode, attempt in attempts if attempt > 1 and (episode, 1) in attempts), default=None)
    address = next(iter(_base_urls(run)), None)
    if newest is None or address is None:
        return 0
    try:
        openai.OpenAI(base_url=address, api_key=attempts[newest, 1].api_key).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "0"}]
        )
    except openai.PermissionDeniedError:
        return 1
    return 0


def _base_urls(run: TestRun) -> Iterator[str]:
    for path in sorted((run.run.path / "endpoints").glob("*.json")):
        yield json.loads(path.read_text())["base_url"]


def _key(run: TestRun, call: WatchedCall) -> EpisodeKey | None:
    return decode_key(call.api_key, run.run.id, RunKeys.load(run.run.keys).secret)


def _wait_finished(run: TestRun, calls: Path) -> None:
    """Wait until the agents have made some more calls after the last death."""

    def made() -> int:
        return sum(path.read_bytes().count(b"\n") for path in calls.glob("calls-*.jsonl"))

    before = made()
    run.wait(lambda _: made() > before + 4 * AT_ONCE, WAIT_TIMEOUT_S)


@contextmanager
def _nobody() -> Iterator[None]:
    yield


@contextmanager
def _agents_outside(run: TestRun, folder: Path, forms: Sequence[str]) -> Iterator[None]:
    """Let outside agents work until the block ends, some through a relay and some without a relay."""
    run.wait(lambda _: any(_base_urls(run)), WAIT_TIMEOUT_S)
    key = run_key(run.run.id, RunKeys.load(run.run.keys).secret)
    port, direct = free_port(), next(iter(_base_urls(run)))
    env = {**os.environ, RUNS_ENV: str(run.run.path.parent)}
    programs = [subprocess.Popen([RRL, "relay", run.run.id, "--port", str(port)], env=env)]
    for name, url, options in (
        ("relay", f"http://127.0.0.1:{port}/v1", ["--streams"]),
        ("direct", direct, ["--retries", str(OUTSIDE_RETRIES)]),
    ):
        programs.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rrl.benchmarks._agents_watched",
                    url,
                    key,
                    *options,
                    "--count",
                    str(OUTSIDE_AT_ONCE),
                    "--log",
                    str(folder / "calls" / f"calls-{name}.jsonl"),
                ],
                env={**os.environ, FORMS_ENV: ",".join(forms) if name == "relay" else "chat"},
            )
        )
    try:
        run.wait(lambda _: len(list((folder / "calls").glob("calls-*.jsonl"))) >= 3, WAIT_TIMEOUT_S)
        yield
        assert all(program.poll() is None for program in programs), "a program outside of the run has ended by itself"
    finally:
        for program in programs[::-1]:
            program.send_signal(signal.SIGKILL)
            program.wait()


@contextmanager
def _keeping_logs(run: TestRun, folder: Path) -> Iterator[None]:
    """Until the block ends, keep each file of the store's log, because a restarted store replaces its log."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.1):
            keep_logs(run.run, folder)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        keep_logs(run.run, folder)


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _read(run: TestRun, folder: Path, times: dict[str, int], refused: int, load: float) -> Deaths:
    calls = read_calls(folder / "calls")
    failed = [call for call in calls if call.error]
    log = StoreLog.read(folder / "logs")
    replayed = log.replayed_turns()
    known = _recorded.answers(folder / "record")
    changed = sum(len(call.tokens) for call in calls if (call.prompt, call.tokens) not in known and not call.error)
    return Deaths(
        times,
        len(calls),
        len(failed),
        sorted({call.error for call in failed}),
        refused,
        sum("ToolGone" in reason for reason in log.failures.values()),
        log.resampled_tokens(),
        changed,
        len(replayed),
        round(sum(replayed) / max(1, len(replayed)), 4),
        len({call.api_key for call in calls}),
        (round(load, 1), round(os.getloadavg()[0], 1)),
    )


class StoreLog:
    """The turns and attempts in the kept files of the store's log."""

    def __init__(self) -> None:
        self.turns: dict[int, TurnCreated] = {}
        self.lengths: Counter[int] = Counter()
        """Number of sampled tokens by turn."""
        self.orphaned: set[int] = set()
        """Turns that had tokens when the process of their attempt died."""
        self.taken: set[int] = set()
        self.finished: dict[int, int] = {}
        """The attempt that finished, by episode."""
        self.failures: dict[tuple[int, int], str] = {}
        """Reason of each failure, by episode and attempt; attempts whose process died are not included."""

    @classmethod
    def read(cls, folder: Path) -> StoreLog:
        """Read all files of the folder. A turn that is in several files counts once."""
        log = cls()
        for path in sorted(folder.iterdir(), key=lambda path: int(path.name.partition(".")[2])):
            for payload in read_frames(path):
                log._add(decode(payload))
        return log

    def _add(self, record: Record) -> None:
        match record:
            case TurnCreated():
                self.turns[record.turn] = record
            case SegmentsAppended(segments=segments):
                for segment in segments:
                    self.lengths[segment.trajectory] = max(self.lengths[segment.trajectory], segment.end)
            case AttemptFailed(episode, attempt, replay=True):
                self.orphaned |= {
                    turn for turn, created in self.turns.items() if created.episode == episode and self.lengths[turn]
                }
            case AttemptFailed(episode, attempt, _, reason):
                self.failures[episode, attempt] = reason
            case EpisodeFinished(episode, attempt):
                self.finished[episode] = attempt
            case TurnTaken(turn):
                self.taken.add(turn)
            case _:
                pass

    def resampled_tokens(self) -> int:
        """Return how many tokens were sampled again although a dead attempt had got tokens for the same request.

        If an attempt failed because its tool had failed, the next attempt begins from the start and may sample
        everything again. So a turn before such a failure is not compared with a turn after it.
        """
        had = {self._question(created): turn for turn in self.orphaned if (created := self.turns[turn]) is not None}
        return sum(
            min(self.lengths[turn], self.lengths[before])
            for turn, created in self.turns.items()
            if (before := had.get(self._question(created), turn)) != turn and turn > before
        )

    def _question(self, turn: TurnCreated) -> tuple[int, int, str]:
        """Return (episode, number of earlier attempts in :attr:`failures`, request) of a turn.

        Two turns with equal results repeat one request.
        """
        failed = sum((turn.episode, attempt) in self.failures for attempt in range(turn.attempt))
        return turn.episode, failed, turn.request

    def replayed_turns(self) -> list[bool]:
        """Return for each turn in :attr:`orphaned` whether a later attempt took it over.

        Turns of episodes that no later attempt finished are left out, because the run is cancelled while agents are at
        work.
        """
        return [
            turn in self.taken
            for turn in sorted(self.orphaned)
            if self.finished.get(self.turns[turn].episode, 0) > self.turns[turn].attempt
        ]
