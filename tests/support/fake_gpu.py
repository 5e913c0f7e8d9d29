"""A double of a node's GPUs for the built-in trainer and its guests on CPUs: never may both be resident, at one pace.

:func:`environment` returns the environment with which a role loads this module (``lent_gpu/sitecustomize.py``); no code
of the product knows it. It changes methods of the classes in :data:`_CHANGES` once their modules are imported:

- One flock a node stands for the memory. It is held by whoever has tensors resident: taken without waiting at the first
  load of a trainer or of a guest's engine, at each restore and each wake, and released at each drop and sleep. Each use
  of the tensors checks that this process has it. A process that cannot take it, or uses what it does not have, writes a
  line into ``violations`` and ends. All events go to ``events``, for tests to wait for.
- A test may let a process fail at an event (:func:`plant`).
- An engine's step and a part of the trainer take at least as long as the pace demands, as in benchmarks/_pace.py.

The lock file is opened when Python starts, so that its descriptor is smaller than that of a baton: a killed process
gives up the memory before the baton.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER_ENV, PACE_ENV = "RRL_TEST_GPU", "RRL_TEST_PACE"
EXIT_CODE = 97
"""Exit code of a process that has violated the exclusion."""
INJECTION = Path(__file__).parent / "lent_gpu"
_LAUNCH_ENV = "RRL_LAUNCH"
"""As :data:`rrl.core.launch.LAUNCH_ENV`, which would import msgspec at the start of each interpreter."""
_HANG_S = 3600.0


# ── for tests ──────────────────────────────────────────────────────────────────────────────────────────────────────
def environment(
    folder: Path, *, token_s: float = 0.0, tau: tuple[float, float] = (0.0, 0.0), record: Path | None = None
) -> dict[str, str]:
    """Return the environment of the trainer and the rollouts of a run.

    Args:
        folder: Existing folder of the double, one per run.
        token_s: Seconds in which the trainer trains an answer token.
        tau: Seconds that a token takes in an engine with b running trajectories: ``tau[0] + tau[1] * b``.
        record: Folder for the times of the work, as those of benchmarks/_pace.py.
    """
    pace = {"token_s": token_s, "tau": list(tau), "record": str(record) if record else ""}
    return {"PYTHONPATH": str(INJECTION), FOLDER_ENV: str(folder), PACE_ENV: json.dumps(pace)}


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events so far: ``at`` (s), ``who`` (an incarnation), ``node``, ``event``."""
    path = folder / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def violations(folder: Path) -> list[str]:
    path = folder / "violations"
    return path.read_text().splitlines() if path.exists() else []


def plant(folder: Path, event: str, node: str, what: str) -> Path:
    """Let the next process on ``node`` that reaches ``event`` do ``what``, once: ``kill``, ``raise``, ``hang``.

    Return a file that no longer exists once a process has done it.
    """
    path = folder / f"plant.{event}.{node}"
    path.write_text(what)
    return path


# ── in the processes of a run ──────────────────────────────────────────────────────────────────────────────────────
class _Memory:
    """The memory of the GPUs of this process's node."""

    def __init__(self, folder: Path) -> None:
        launch = json.loads(Path(os.environ[_LAUNCH_ENV]).read_text())
        replica = launch["incarnation"]["replica"]
        self.who, self.node = f"{replica}#{launch['incarnation']['number']}", launch["node"]
        self.shares = replica.partition("/")[0] in ("trainer", "standby", "guest")
        self._folder, self._held = folder, False
        self._lock = os.open(folder / f"gpu.{self.node}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, event: str, **further: float) -> None:
        """Record an event, and fail if a test wants it."""
        line = json.dumps({"at": time.time(), "who": self.who, "node": self.node, "event": event, **further}) + "\n"
        with (self._folder / "events").open("a") as file:
            file.write(line)
        planted = self._folder / f"plant.{event}.{self.node}"
        try:
            what = planted.read_text()
            planted.unlink()
        except FileNotFoundError:
            return
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hang":
            time.sleep(_HANG_S)
        else:
            raise RuntimeError(f"CUDA error: planted by the test at {event}")

    def take(self, event: str) -> None:
        """Have tensors resident from now on."""
        self.note(event)
        if not self.shares or self._held:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._violated(f"{event}, and another process has tensors resident")
        self._held = True

    def release(self, event: str) -> None:
        """Have no tensors resident any more."""
        if self._held:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._held = False
        self.note(event)

    def check(self, use: str) -> None:
        """Check that the tensors are resident."""
        if self.shares and not self._held:
            self._violated(f"{use} without resident tensors")

    def _violated(self, what: str) -> None:
        with (self._folder / "violations").open("a") as file:
            file.write(f"{time.time():.3f} {self.who} on {self.node}: {what}\n")
        os._exit(EXIT_CODE)


class _Pace:
    def __init__(self, token_s: float, tau: Sequence[float], record: str) -> None:
        self.token_s, self._tau, self._record = token_s, tau, record

    def token(self, running: int) -> float:
        return self._tau[0] + self._tau[1] * running if running else 0.0

    def step(self, tokens: Sequence[int]) -> float:
        """Return the seconds of an engine step in which the trajectories get these numbers of tokens."""
        return sum(self.token(sum(count > place for count in tokens)) for place in range(max(tokens, default=0)))

    @contextlib.contextmanager
    def lasting(self, role: str, seconds: Callable[[], float]) -> Iterator[None]:
        begun = time.monotonic()
        yield
        computed, due = time.monotonic() - begun, seconds()
        if due > computed:
            time.sleep(due - computed)
        if due and self._record:
            took = time.monotonic() - begun
            with (Path(self._record) / f"{role}-{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps([round(due, 5), round(computed, 5), round(took, 5)]) + "\n")


def _engine(module: ModuleType, memory: _Memory, pace: _Pace) -> None:
    kind = module.TorchEngine
    init, step, load, probe = kind.__init__, kind.step, kind.load, kind.probe

    def first_load(self: Any, *args: Any, **settings: Any) -> None:
        memory.take("build")
        init(self, *args, **settings)

    steps = [0]

    def paced_step(self: Any) -> Any:
        memory.check("a step of the engine")
        steps[0] += 1
        if steps[0] == 2:
            memory.note("generates")  # and the tokens of the first step since the wake are on their way to the store
        segments: list[Any] = []
        with pace.lasting("rollout", lambda: pace.step([len(segment.tokens) for segment in segments])):
            segments, finished = step(self)
        return segments, finished

    def checked_load(self: Any, *args: Any) -> None:
        memory.check("a load of weights")
        load(self, *args)

    def checked_probe(self: Any) -> None:
        memory.check("a probe of the engine")
        probe(self)

    kind.__init__, kind.step, kind.load, kind.probe = first_load, paced_step, checked_load, checked_probe
    # as vLLM, and unlike the engine in plain torch: new work whenever a place is free
    kind.free_slots = property(lambda self: self._lease - len(self._rows) - len(self._already_complete))
    if hasattr(kind, "sleep"):
        sleep, wake = kind.sleep, kind.wake

        def releasing_sleep(self: Any) -> None:
            memory.note("sleep")
            sleep(self)
            memory.release("asleep")

        def taking_wake(self: Any) -> None:
            steps[0] = 0
            memory.take("wake")
            wake(self)

        kind.sleep, kind.wake = releasing_sleep, taking_wake


def _learner(module: ModuleType, memory: _Memory, pace: _Pace) -> None:
    kind = module.Learner
    init, opening, add, close = kind.__init__, kind.open, kind.add, kind.close

    def first_load(self: Any, *args: Any, **settings: Any) -> None:
        memory.take("load")
        init(self, *args, **settings)

    def checked_open(self: Any, *args: Any) -> None:
        memory.check("a step of the trainer")
        opening(self, *args)

    def paced_add(self: Any, part: Any) -> None:
        memory.check("a part of the trainer")
        tokens = sum(len(trajectory.tokens) for trajectory in part.trajectories)
        with pace.lasting("trainer", lambda: tokens * pace.token_s):
            add(self, part)

    def checked_close(self: Any) -> Any:
        memory.check("the end of the trainer's step")
        return close(self)

    kind.__init__, kind.open, kind.add, kind.close = first_load, checked_open, paced_add, checked_close


def _lending(module: ModuleType, memory: _Memory, pace: _Pace) -> None:
    kind = module.DeviceState
    drop, restore = kind.drop, kind.restore

    def releasing_drop(self: Any, *args: Any, **settings: Any) -> None:
        memory.note("drop")
        drop(self, *args, **settings)
        memory.release("dropped")

    def taking_restore(self: Any, *args: Any, **settings: Any) -> None:
        memory.take("restore")
        restore(self, *args, **settings)
        memory.note("restored")

    kind.drop, kind.restore = releasing_drop, taking_restore


def _baton(module: ModuleType, memory: _Memory, pace: _Pace) -> None:
    kind = module.LeaderBaton
    take = kind.take

    def noted_take(self: Any, *args: Any, **settings: Any) -> Any:
        memory.note("take")
        taken = take(self, *args, **settings)
        memory.note("taken", took=taken.wait_s, clean=taken.clean, killed=taken.killed)
        return taken

    kind.take = noted_take


_CHANGES: dict[str, Callable[[ModuleType, _Memory, _Pace], None]] = {
    "rrl.roles.lending.baton": _baton,
    "rrl.roles.rollout.torch_engine": _engine,
    "rrl.roles.trainer.learner": _learner,
    "rrl.roles.trainer.lending": _lending,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes a module of :data:`_CHANGES` when it is imported."""

    def __init__(self, memory: _Memory, pace: _Pace) -> None:
        self._memory, self._pace = memory, pace

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute, change = spec.loader.exec_module, _CHANGES[name]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module, self._memory, self._pace)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Change the built-in roles of this process, if :func:`environment` is its environment."""
    if FOLDER_ENV in os.environ and _LAUNCH_ENV in os.environ:
        memory, pace = _Memory(Path(os.environ[FOLDER_ENV])), _Pace(**json.loads(os.environ[PACE_ENV]))
        sys.meta_path.insert(0, _Finder(memory, pace))
