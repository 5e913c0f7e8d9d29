"""Submits runs, follows their journals, injects failures, and checks that no process or file of a run is left.

Every wait is for a record of the journal, with a deadline that only a broken build reaches.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rrl.core.launch import LAUNCH_ENV
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import STANDBY_ROLE, Incarnation, Outcome, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Resize, RestartAll
from rrl.manager.model.state import State, Status
from rrl.manager.storage.journal import Follower, replay
from rrl.tests.support.cli.explained import assert_explained
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.supervisor import end_runs_with_caller

TIMEOUT_S = 120.0
"""Deadline (s) of one wait. It is generous, because two shared cores start a dozen interpreters."""
RRL = str(Path(sys.executable).parent / "rrl")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
LIGHT = Path(__file__).with_name("light_roles")
SLOW_STEPS = 'env.RRL_TEST_STEP_SECONDS = "0.3"'
WITHOUT_MODEL = tuple(
    (f"[roles.{role}]", f'[roles.{role}]\ncommand = ["{sys.executable}", "{LIGHT}/{program}"]\nmem = "256MiB"\n{more}')
    for role, program, more in (("trainer", "light_trainer.py", SLOW_STEPS), ("rollout", "light_turn_rollout.py", ""))
)
"""Changes of ``examples/agents.toml`` after which trainer and rollouts do not load torch, which takes 4 s of CPU each.
The answer to each turn is a random digit."""


def light_job(
    cluster: str,
    steps: int,
    *,
    rollouts: int = 2,
    spares: int = 1,
    warm: bool = True,
    one_node: bool = False,
    step_seconds: float | None = None,
    extra: str = "",
) -> str:
    """Return the job.toml of a run without models: manager, steps, agents, store, reward and weight transport are real.

    Each node has an agent, and each spare node and each standby process of the trainer (``warm``) costs processes. A
    test that does not need these processes leaves them out, and puts all roles on ``one_node``. Each step takes the
    processes 40 ms of CPU. By default, ``step_seconds`` is 0.1, and 0.3 in a run of so many steps that it only has to
    last until its test ends it.
    """
    step_seconds = step_seconds or (0.1 if steps < 1000 else 0.3)
    python = sys.executable
    node = 'cpus = 8, mem = "2GiB"' if one_node else 'cpus = 2, mem = "1GiB"'
    exclusive = str(not one_node).lower()
    tags = "" if "[tags]" in extra else '[tags]\nspare = ["train"]\n'  # extras cost processes, too
    return f"""
[run]
name = "light"
steps = {steps}
[cluster]
kind = "{cluster}"
spares = {spares}
node = {{ {node} }}
[task]
function = "light_task:make"
[model]
tokenizer = {{ pieces = "0123456789" }}
[sampling]
prompts_per_step = 2
group_size = 4
max_new_tokens = 5
[roles.trainer]
warm = {str(warm).lower()}
exclusive = {exclusive}
command = ["{python}", "{LIGHT}/light_trainer.py"]
mem = "256MiB"
env.RRL_TEST_STEP_SECONDS = "{step_seconds}"
[roles.rollout]
replicas = {rollouts}
exclusive = {exclusive}
command = ["{python}", "{LIGHT}/light_rollout.py"]
mem = "256MiB"
[roles.trajectories]
mem = "256MiB"
[roles.reward]
mem = "256MiB"
[transport]
weights = "tcp"
{tags}[limits]
heartbeat = "500ms"
silence = "4s"
poll = "1s"
lease = "3s"
quiet = "10s"
step_grace = "3s"
{extra}
"""


def with_light_task(toml: str) -> str:
    """Return a job with the task of the light roles.

    The import of reasoning-gym would take each process 1.2 s of CPU.
    """
    table = r"(?ms)^\[task\]\n.*?^(?=\[)"
    changed, count = re.subn(table, '[task]\nfunction = "light_task:make"\n\n', toml)
    assert count == 1
    return changed


Incarnations = dict[ReplicaId, tuple[Incarnation, int | None, str | None]]
"""Incarnation, pid and node of every replica; pid or node is None while the state does not contain it."""


class TestRun:
    """A run in the folder ``runs``.

    ``call`` runs a command line of rrl as the submitting user, who is a plain user in a Slurm lab.
    """

    __test__ = False

    def __init__(self, run: RunDir, call: Callable[..., subprocess.Popen[str]]) -> None:
        self.run = run
        self.call = call
        self._follower = Follower(run)

    def state(self) -> State:
        state = self._follower.state()
        assert state is not None
        return state

    def events(self) -> list[ev.Stamped]:
        return list(replay(self.run))

    def wait(self, condition: Callable[[State], Any], timeout_s: float = TIMEOUT_S) -> State:
        """Wait until ``condition`` holds for the state; fail with the newest records if the run ends before that."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            state = self._follower.state()
            if state is not None and condition(state):
                return state
            if state is not None and state.outcome is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"never: {self._account()}")

    def wait_end(self, timeout_s: float = TIMEOUT_S) -> State:
        return self.wait(lambda state: state.outcome is not None, timeout_s)

    def wait_resumed(self) -> None:
        """Wait until the journal continues after the run's end."""
        until = time.monotonic() + TIMEOUT_S
        while self.state().outcome is not None:
            assert time.monotonic() < until, self._account()
            time.sleep(0.05)

    def wait_steps(self, steps: int) -> State:
        return self.wait(lambda state: state.step >= steps and all_work(state))

    def wait_back_alone(self, before: Incarnations, replica: ReplicaId, *also: ReplicaId) -> Incarnations:
        """Wait until the next incarnation of ``replica`` works; only it and ``also`` may differ from ``before``."""
        following = before[replica][0].number + 1  # a first launch may have failed, because slurmctld is busy at times
        after = current_incarnations(
            self.wait(lambda s: s.replica(replica).incarnation_number == following and all_work(s))
        )
        unchanged, now = without_replicas(before, after, [replica, *also])
        assert now == unchanged, "another replica was restarted or moved"
        return after

    def hold_in_the_middle(self, index: int | str) -> None:
        """Make a rollout stop with unfinished trajectories, until :meth:`let_go`; ``burst-0`` is one of a pool."""
        held = self.run.path / f"held.{index}"
        held.unlink(missing_ok=True)
        (self.run.path / f"hold.{index}").touch()
        self.wait(lambda _: held.exists())

    def let_go(self, index: int | str) -> None:
        (self.run.path / f"hold.{index}").unlink()

    @contextmanager
    def hold_between_commits(self) -> Iterator[None]:
        """Keep the light trainer waiting after the first step since its last commit."""
        hold, held = (self.run.path / name for name in ("hold.trainer", "held.trainer"))
        held.unlink(missing_ok=True)
        hold.touch()
        try:
            self.wait(lambda state: held.exists() and all_work(state))
            yield
        finally:
            hold.unlink()

    def continued(self, dead: float) -> list[int]:
        """Return the ids of trained trajectories that one incarnation began and another incarnation finished.

        ``dead`` is the mark of the first incarnation: the light rollout records it as log-probability.
        """
        continued = []
        for path in sorted((self.run.path / "batches").glob("*.json")):
            for one in json.loads(path.read_text()):
                assert one["tokens"] == [one["tokens"][0]] * 4 + [1], one
                if dead in one["marks"] and len(set(one["marks"])) > 1:
                    continued.append(one["id"])
        return continued

    def resize(self, pool: str, replicas: int | str) -> None:
        """Set the number of an elastic pool's replicas by ``rrl resize``; ``auto`` leaves it to the run again."""
        process = self.call(
            "resize", self.run.id, pool, str(replicas), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        shown, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, shown

    def wait_gone(self, timeout_s: float = 30.0) -> None:
        """Wait until no process of the run and no file outside of its run directory is left (invariant 7).

        Check the records of the run if it has ended.
        """
        until = time.monotonic() + timeout_s
        while left := dict(processes_of(self.run)):
            assert time.monotonic() < until, f"left behind: {left}"
            time.sleep(0.1)
        files = [path for folder in ("/tmp", "/dev/shm", "/run") for path in Path(folder).glob(f"*{self.run.id}*")]
        assert not files
        if self.state().outcome is not None:
            check_records(self.run)

    def processes(self) -> dict[int, str]:
        return dict(processes_of(self.run))

    def summary(self) -> dict[str, Any]:
        until = time.monotonic() + 30
        while not self.run.summary.exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        summary: dict[str, Any] = json.loads(self.run.summary.read_text())
        return summary

    def _account(self) -> str:
        tail = "\n".join(f"{s.seq} {s.at:.2f} {s.event!r:.300}" for s in self.events()[-40:])
        log_files = [*self.run.logs.glob("*"), *self.run.submit.glob("*.err"), *self.run.submit.glob("*.log")]
        logs = "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(log_files)
            if not path.is_symlink() and path.stat().st_size  # the log of a promoted standby has a second name
        )
        return f"{tail}\n{logs}"


def all_work(state: State) -> bool:
    """Return whether every replica has joined and every rollout holds weights."""
    return all(r.status is Status.JOINED for r in state.workers) and all(
        r.weight_version is not None for r in state.workers if state.job.traits_of(r.id).gets_weights
    )


def current_incarnations(state: State) -> Incarnations:
    """Return incarnation, pid and node of every worker and agent.

    Standby processes are left out, because they change often.
    """
    present = [r for r in state.replicas.values() if r.status is not Status.RETIRED and r.role != STANDBY_ROLE]
    return {r.id: (r.incarnation, r.pid, r.node) for r in present}


def joined_incarnations(run: TestRun) -> Incarnations:
    """Wait for step 3 and for every worker and agent to join; return them as :func:`current_incarnations` does.

    On a busy machine the agent of a spare node may join after the trainer has trained.
    """

    def joined(state: State) -> bool:
        pids = [pid for _, pid, _ in current_incarnations(state).values()]
        return state.step >= 3 and all_work(state) and None not in pids

    return current_incarnations(run.wait(joined))


def processes_of(run: RunDir) -> Iterator[tuple[int, str]]:
    """Yield pid and command line of each process whose environment or command line names the run."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state == "Z":
            continue
        marked = f"{LAUNCH_ENV}={run.path}/".encode() in environ
        if marked or str(run.path) in command:
            yield int(entry.name), command


def cancel(run: TestRun) -> None:
    """Cancel a run by ``rrl cancel``, wait until none of its processes is left, and check its records and its store."""
    with run.call("cancel", run.run.id) as process:
        assert process.wait(90) == 0
    assert run.wait_end().outcome == "cancelled"
    run.wait_gone()
    check_sound(run.run)


def check_sound(run: RunDir) -> None:
    """Check the invariants that the journal and the store of a finished run can show."""
    outcome = check_records(run)
    audit = msgspec.json.decode((run.store / "audit.json").read_bytes())
    assert audit["made"] == audit["trained"] + sum(audit["dropped"].values()) + audit["open"]  # invariant 1
    assert audit["open"] == 0 or outcome is not Outcome.COMPLETED
    groups = [group for groups in audit["steps"].values() for group in groups]
    for number, parts in audit["parts"].items():
        in_parts = [group for part in parts for group in part]
        assert audit["steps"].get(number, in_parts) == in_parts, "a step has other groups than its parts"
        groups += in_parts if number not in audit["steps"] else []
    assert len(groups) == len(set(groups)), "a group was trained twice"
    assert max(map(int, audit["ages"]), default=0) <= audit["max_age"]
    if outcome is Outcome.COMPLETED and not sum(audit["dropped"].values()) and _undisturbed(run):
        assert _complaints(run) == []


def _undisturbed(run: RunDir) -> bool:
    """Return whether nothing happened to a run of which its processes may report an error."""
    events = [stamped.event for stamped in replay(run)]
    decisions = [event.action for event in events if isinstance(event, ev.Decided)]
    managers = sum(isinstance(event, ev.ManagerStarted) for event in events)
    return managers == 1 and not any(
        isinstance(
            one, Fence | Resize | RestartAll | Exclude | ev.FindingChanged | ev.FaultInjected | ev.FaultRequested
        )
        for one in (*events, *decisions)
    )


def _complaints(run: RunDir) -> list[str]:
    """Return the errors in the logs of a run and of its manager."""
    files = [path for folder in (run.logs, run.submit) for path in folder.iterdir() if path.suffix != ".pkl"]
    lines = [line for path in files for line in path.read_text(errors="replace").splitlines()]
    return [line for line in lines if re.search(r" (ERROR|CRITICAL) |Traceback|never retrieved", line)]


def check_records(run: RunDir) -> Outcome | None:
    """Check the invariants that the journal can show, and that each decision is explained; return how the run ended."""
    current: dict[ReplicaId, int] = {}
    outcome = None
    records = list(replay(run))
    for stamped in records:
        event = stamped.event
        if isinstance(event, ev.Intended | ev.Decided):
            assert event.action.why.evidence, f"no evidence for {event.action}"  # invariant 6
        if isinstance(event, ev.Joined):  # invariant 2: numbers of joined incarnations never fall
            assert event.incarnation.number >= current.get(event.incarnation.replica, 0)
            current[event.incarnation.replica] = event.incarnation.number
        if isinstance(event, ev.RunEnded):
            outcome = event.outcome
    if records:  # a run whose managers all failed at their start has none
        assert_explained(records)
    return outcome


def submit_here(tmp_path: Path, toml: str, rrl: str = RRL) -> TestRun:
    """Submit a job to the local cluster in the background; the run ends at the latest when the calling process ends.

    Args:
        rrl: The program rrl, whose environment the run's own roles have.
    """
    end_runs_with_caller(tmp_path / "runs")
    env = {**os.environ, RUNS_ENV: str(tmp_path / "runs")}

    def call(*argv: str, **popen: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([rrl, *argv], env=env, text=True, **popen)

    return submitted(write_job(tmp_path, toml), tmp_path / "runs", call)


def submit_on(lab: SlurmLab, name: str, toml: str, shell: Mapping[str, str] | None = None) -> TestRun:
    """Submit a job to the lab's Slurm as its plain user, from a folder of that user.

    Args:
        shell: Environment variables of the user's shell.
    """
    folder = lab.user_home / name
    lab.call_as_user(folder.mkdir)
    runs = folder / "runs"

    def call(*argv: str, **popen: Any) -> subprocess.Popen[str]:
        return lab.popen_as_user([RRL, *argv], env={**(shell or {}), RUNS_ENV: str(runs)}, cwd=folder, **popen)

    job = write_job(folder, toml)
    return submitted(job, runs, call)


def wait_for_run(runs: Path) -> RunDir:
    """Wait for the manager of the only run in ``runs``; return the run."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        if found := list(runs.glob("*/journal/*.seg")):
            return RunDir(found[0].parent.parent)
        time.sleep(0.05)
    raise AssertionError(f"no run in {runs}")


def write_job(folder: Path, toml: str) -> Path:
    """Write ``job.toml`` and the light task into ``folder``; return the path of ``job.toml``."""
    job = folder / "job.toml"
    job.write_text(toml)
    for source in LIGHT.glob("*_task.py"):
        (folder / source.name).write_text(source.read_text())
    return job


def submitted(job: Path, runs: Path, call: Callable[..., subprocess.Popen[str]]) -> TestRun:
    process = call("submit", str(job), "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return TestRun(RunDir(runs / json.loads(out)["run"]), call)


def without_replicas(
    before: Incarnations, after: Incarnations, but: Sequence[ReplicaId]
) -> tuple[Incarnations, Incarnations]:
    """Return ``before`` and ``after`` without the replicas ``but``.

    The two results are equal if no other replica was replaced.
    """
    unchanged, now = ({id: observed for id, observed in some.items() if id not in but} for some in (before, after))
    return unchanged, now
