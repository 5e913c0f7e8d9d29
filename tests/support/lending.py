"""Runs whose trainer lends its nodes, with the built-in roles and the double of a GPU (tests/support/fake_gpu.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rrl.core.types import TRAINER, Incarnation, NodeName, guest_id, member_id
from rrl.manager.model import events as ev
from rrl.manager.model.state import Replica, State, Status
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import SegmentsAppended, decode
from rrl.tests.support import fake_gpu
from rrl.tests.support.roles.trainer.replayed import KeptLogs, assert_bit_equal, in_order
from rrl.tests.support.runs import TestRun, check_sound, submit_here

WAIT_S = 240.0
"""Deadline (s) of one wait. Five processes that import torch share two cores with other tests."""
RANKS = 2
TAU = (0.04, 0.0)
"""Seconds of a token. The rollouts alone need several times as long for a step as the trainer."""
TOKEN_S = 0.001

WINDOW = 'window = "5s"'
"""Within the window, a guest that fails again is left out; the tests let guests fail one after the other."""


def job(
    gpu: Path,
    steps: int,
    *,
    cluster: str = "local",
    rollouts: int = 1,
    ranks: int = RANKS,
    spares: int = 0,
    warm: bool = False,
    tags: str = 'trainer = ["rollout"]',
    sampling: str = "staleness = 1",
    recovery: str = WINDOW,
    extra: str = "",
    tau: tuple[float, float] = TAU,
    token_s: float = TOKEN_S,
) -> str:
    """Return the job.toml of a run; ``gpu`` is the folder of its fake GPUs.

    The learning rate is constant, so that a replay does not depend on the number of steps, which a resume may change.
    """
    env = "\n".join(
        f"env.{name} = {json.dumps(value)}"
        for name, value in fake_gpu.environment(gpu, token_s=token_s, tau=tau).items()
    )
    return f"""
[run]
name = "lending"
steps = {steps}
[cluster]
kind = "{cluster}"
spares = {spares}
node = {{ cpus = 2, mem = "3GiB" }}
[task]
function = "uneven_task:make"
[model]
hidden_size = 16
intermediate_size = 32
layers = 1
heads = 2
kv_heads = 2
max_length = 64
tokenizer = {{ pieces = "0123456789" }}
[sampling]
prompts_per_step = 8
group_size = 4
max_new_tokens = 24
stream = true
{sampling}
[tags]
spare = ["train"]
{tags}
[roles.trainer]
ranks = {ranks}
warm = {str(warm).lower()}
final_learning_rate = 1.0
{env}
[roles.rollout]
replicas = {rollouts}
lease = 8
segment_tokens = 2
{env}
[transport]
weights = "tcp"
[recovery]
backoff = "100ms"
per_replica = 20
per_node = 20
{recovery}
[limits]
heartbeat = "500ms"
silence = "10s"
poll = "1s"
lease = "3s"
quiet = "10s"
step_grace = "3s"
join = "300s"
{extra}
"""


class LendingRun:
    """A run whose trainer lends; its store's logs are kept for :meth:`check`.

    ``submit`` submits a job.toml in ``folder``. The settings are those of :func:`job`.
    """

    def __init__(
        self, folder: Path, steps: int, submit: Callable[[Path, str], TestRun] = submit_here, **settings: Any
    ) -> None:
        self.gpu = folder / "gpu"
        self.gpu.mkdir(exist_ok=True)
        self.toml = job(self.gpu, steps, **settings)
        self.steps, self._ranks = steps, settings.get("ranks", RANKS)
        self.test = submit(folder, self.toml)
        self._logs = KeptLogs(self.test.run, folder / "logs")

    def __enter__(self) -> LendingRun:
        self._logs.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._logs.__exit__()

    # ── waits ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def wait(self, condition: Callable[[State], Any]) -> State:
        return self.test.wait(condition, WAIT_S)

    def happened(self, event: str, *, by: str = "", since: float = 0.0, times: int = 1) -> bool:
        """Return whether an event has happened ``times`` times since then; ``by`` begins the name of its process."""
        found = [
            one
            for one in fake_gpu.events(self.gpu)
            if one["event"] == event and one["who"].startswith(by) and one["at"] > since
        ]
        return len(found) >= times

    def wait_event(self, event: str, *, by: str = "", since: float = 0.0, times: int = 1) -> None:
        self.wait(lambda _: self.happened(event, by=by, since=since, times=times))

    def wait_unmanaged(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while no manager writes the journal."""
        until = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < until, fake_gpu.events(self.gpu)[-20:]
            time.sleep(0.1)

    def wait_awake(self, since: float = 0.0, but: NodeName | None = None) -> NodeName:
        """Wait until a guest generates that woke after ``since``; return its node, which is not ``but``."""
        found: list[NodeName] = []

        def awake(state: State) -> bool:
            found[:] = [node for node in self.awake(state, since) if node != but]
            return bool(found)

        self.wait(awake)
        return found[0]

    def awake(self, state: State, since: float = 0.0) -> list[NodeName]:
        """Return the nodes whose current guests generate, and began after ``since``."""
        newest = {one["node"]: one for one in fake_gpu.events(self.gpu)}
        return [
            NodeName(node)
            for node, one in newest.items()
            if one["event"] == "generates"
            and one["at"] > since
            and (guest := state.replicas.get(guest_id(NodeName(node)))) is not None
            and (one["who"], guest.status) == (str(guest.incarnation), Status.JOINED)
        ]

    # ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────
    def guest(self, node: NodeName) -> Replica:
        return self.test.state().replica(guest_id(node))

    def member(self, rank: int) -> Replica:
        return self.test.state().replica(member_id(TRAINER, rank))

    def kill(self, replica: Replica, number: signal.Signals = signal.SIGKILL) -> None:
        assert replica.pid is not None, replica
        os.kill(replica.pid, number)

    def trainer_incarnations(self) -> int:
        return self.test.state().replica(TRAINER).incarnation_number

    def wait_performed(self, planted: Path) -> None:
        """Wait until a process has failed as :func:`fake_gpu.plant` wanted."""
        self.wait(lambda _: not planted.exists())

    def trainer_returns(self, number: int) -> State:
        """Wait for this incarnation of the trainer; no other may come before it."""
        state = self.wait(lambda state: state.replica(TRAINER).incarnation_number >= number)
        assert self.trainer_incarnations() == number
        return state

    def guest_returns(self, before: Replica) -> None:
        """Wait until a guest's incarnation after ``before`` has joined."""

        def joined(state: State) -> bool:
            one = state.replica(before.id)
            return one.incarnation_number > before.incarnation_number and one.status is Status.JOINED

        self.wait(joined)

    @contextmanager
    def managed(self) -> Iterator[None]:
        """Start another manager, after the first has died."""
        with self.test.call("manage", self.test.run.id, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            yield

    def resume(self, job: Path, steps: int) -> None:
        """Resume the run with another job.toml, until this step."""
        argv = ("resume", self.test.run.id, "--job", str(job), "--steps", str(steps))
        with self.test.call(*argv, stdout=subprocess.DEVNULL) as process:
            assert process.wait(WAIT_S) == 0
        self.test.wait_resumed()
        self.steps = steps

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────
    def cancel(self) -> State:
        """Cancel the run, and check everything that must hold whatever was killed."""
        process = self.test.call("cancel", self.test.run.id, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        shown, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, shown
        state = self.test.wait_end(WAIT_S)
        assert state.outcome == "cancelled", state.why
        self.check()
        return state

    def finish(self) -> State:
        """Wait for the end, and check everything that must hold whatever was killed."""
        state = self.test.wait_end(2 * WAIT_S)
        assert (state.outcome, state.step) == ("completed", self.steps), state.why
        self.check()
        return state

    def check(self) -> None:
        """Check the exclusion, the records, and that the trained state is that of a gang that never lent."""
        self.test.wait_gone(60.0)
        assert fake_gpu.violations(self.gpu) == []
        check_sound(self.test.run)
        self.check_trained()

    def check_trained(self) -> None:
        """Check that the committed state is that of a gang that never lent and was never interrupted, bit for bit."""
        self._logs.__exit__()
        assert_bit_equal(self.test.run, self._logs.folder, self._ranks)

    def continued_by_others(self, dead: Incarnation) -> list[int]:
        """Return the trajectories that ``dead`` began, and that others went on with; from the kept logs."""
        begun, continued = set[int](), set[int]()
        for path in in_order(self._logs.folder):
            for record in map(decode, read_frames(path)):
                if not isinstance(record, SegmentsAppended):
                    continue
                trajectories = {segment.trajectory for segment in record.segments}
                if record.incarnation == dead:
                    begun |= trajectories - set(record.finished)
                else:
                    continued |= trajectories & begun
        return sorted(continued)

    def commits(self) -> list[ev.StepCommitted]:
        return [one.event for one in self.test.events() if isinstance(one.event, ev.StepCommitted)]
