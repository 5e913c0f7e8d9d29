"""``make soak``: injects hundreds of random faults into runs, and checks every invariant that journal and store show.

The first runs have light workers on the local cluster: manager, steps, agents, store, reward and weight transport are
real, and there is no model. One of them has an elastic pool whose nodes are preempted at random. The next run has
agents that make streamed calls in all forms, in which no call may fail. The next run has torch
roles on the local cluster, and its trainer lends its nodes: this program kills and stops members of the trainer,
guests, the store and the manager at random, while tests/support/fake_gpu.py checks that never two processes have
tensors resident on a node; at the end, weights and moments must be those of a training that was never interrupted. The
last runs have the quickstart's torch roles on a real Slurm of this machine. A run continues until all its faults were
injected, and is then cancelled. A run that ends earlier has failed. If a manager is killed on the local cluster, the
program starts another one, as Slurm would.

The program prints the violations, and a JSON object as its last line, in which all values except ``faults`` must be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
from msgspec import Struct

from rrl.core.processes import read_process
from rrl.core.run_dir import RunDir
from rrl.core.types import (
    GUEST_ROLE,
    STORE,
    SUPPORT_ROLES,
    Incarnation,
    NodeName,
    Outcome,
    ReplicaId,
    Verdict,
    gang_of,
    is_trainer,
    role_of,
)
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Launch, Resize
from rrl.manager.model.state import Replica, State, Status
from rrl.manager.storage.journal import replay
from rrl.manager.storage.lease import holder
from rrl.roles.trajectories.durable.audit import Audit, audit
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import decode
from rrl.tests.support import fake_gpu
from rrl.tests.support.agents_example import submit_agents_example
from rrl.tests.support.cli.explained import assert_explained
from rrl.tests.support.lending import LendingRun
from rrl.tests.support.queue_cluster import Queue, submit_to
from rrl.tests.support.runs import (
    QUICKSTART,
    TIMEOUT_S,
    WITHOUT_MODEL,
    TestRun,
    light_job,
    processes_of,
    submit_here,
    submit_on,
)
from rrl.tests.support.slurm.lab import COMPLETING_TIMEOUT_S, SlurmLab
from rrl.tests.support.supervisor import exit_on_sigterm

LIGHT_FAULTS = 210
LIGHT_RUNS = 4
ELASTIC_RUN = 1
"""Number of the run with an elastic pool."""
AGENTS_FAULTS = 60
LENDING_FAULTS = 200
TORCH_FAULTS = 22
TORCH_NODES = 5
STEPS = 1_000_000
"""Number of steps of a run, which a run never reaches, because it is cancelled after its faults."""
SPELL = 240.0
"""Seconds without a fault after which a run counts as stuck."""
LIGHT = """
first_pass = "2s"
[recovery]
window = "60s"
per_replica = 30
per_node = 10
backoff = "100ms"
exclusion = "20s"
breaker = 0.5
{phases}
[faults]
seed = {seed}
[[faults.random]]
kinds = ["kill", "exit", "exception", "kill_step"]
every = "4s"
amount = 3
[[faults.random]]
kinds = ["engine_dead"]
target = "rollout"
every = "30s"
[[faults.random]]
kinds = ["engine_dead"]
target = "trainer"
every = "60s"
[[faults.random]]
kinds = ["freeze", "slow"]
every = "12s"
seconds = "6s"
amount = 0.3
[[faults.random]]
kinds = ["kill"]
target = "{agent}"
every = "30s"
[[faults.random]]
kinds = ["kill"]
target = "manager"
every = "40s"
[[faults.random]]
kinds = ["crash"]
target = "rollout"
every = "60s"
seconds = "10s"
"""
AGENTS = """
[recovery]
window = "60s"
per_replica = 30
per_node = 10
backoff = "100ms"
exclusion = "20s"
breaker = 0.5
[faults]
seed = 5
[[faults.random]]
kinds = ["kill", "exit", "kill_step"]
every = "4s"
[[faults.random]]
kinds = ["freeze"]
every = "20s"
seconds = "6s"
[[faults.random]]
kinds = ["kill"]
target = "agents"
every = "20s"
[[faults.random]]
kinds = ["kill"]
target = "manager"
every = "40s"
"""
STREAMING = """
import itertools, json, httpx2, openai
from guess_task import CLIENT, GUESSES, Digits

FORMS = itertools.count()
HTTP = httpx2.AsyncClient(timeout=600)

async def chat(client, messages):
    stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
    parts = [event async for event in stream]
    assert parts[-1].choices[0].finish_reason, parts
    return "".join(part.choices[0].delta.content or "" for part in parts)

async def responses(client, messages):
    events = [event async for event in await client.responses.create(model="policy", input=messages, stream=True)]
    assert events[-1].type in ("response.completed", "response.incomplete"), events
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")

async def anthropic(client, messages):
    body = {"model": "policy", "max_tokens": 2, "messages": messages, "stream": True}
    text, ended = "", False
    url, headers = f"{client.base_url}messages", {"x-api-key": client.api_key}
    async with HTTP.stream("POST", url, json=body, headers=headers) as reply:
        if reply.status_code == 403:
            raise openai.PermissionDeniedError("over", response=reply, body=None)
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            text += event.get("delta", {}).get("text", "")
            ended |= event.get("type") == "message_stop"
    assert ended, "the stream has no end"
    return text

async def run(item, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key, max_retries=0)
    ask, messages = (chat, responses, anthropic)[next(FORMS) % 3], [{"role": "user", "content": "?"}]
    try:
        for guess in range(GUESSES):
            answer = await ask(client, messages)
            if answer == item:
                return 1.0 - 0.1 * guess
            hint = "<" if answer.isdigit() and item < answer else ">"
            messages += [{"role": "assistant", "content": answer or "?"}, {"role": "user", "content": hint}]
        return 0.0
    except openai.PermissionDeniedError:
        raise
    except Exception as error:
        with open("errors.txt", "a") as file:
            file.write(f"{ask.__name__}: {error!r}\\n")
        raise
"""
"""An agent of the task of examples/agents.toml whose episodes take turns in the forms of their calls."""
ELASTIC = """
[rollouts.burst]
replicas = { min = 0, max = 3 }
node_hours = 100
"""
PREEMPTED = Queue("burst", wait_s=2.0, lifetime_s=20.0)
"""The queue of the elastic pool: each node is preempted, after 20 s on average."""
LENDING = """
window = "5s"
breaker = 0.5
exclusion = "20s"
"""
"""Keys of [recovery] of the run that lends."""
LENDING_TAGS = 'trainer = ["rollout"]\nhandback = "2s"'
TORCH = """
[recovery]
per_replica = 30
per_node = 10
backoff = "200ms"
[faults]
seed = 11
[[faults.random]]
kinds = ["kill", "exit", "kill_step"]
every = "12s"
amount = 3
"""
HANGS = "".join(
    f'[phases.{name}]\nshortest = "8s"\nlongest = "8s"\n'
    for name in ("generate", "train", "between", "checkpoint", "publish", "score")
)
"""Deadlines of phases. They are short, so that hangs are found during the run; by default a phase may last for
hours."""


class Tally(Struct):
    """The results of all runs."""

    faults: int = 0
    """Number of faults that were carried out."""
    violations: int = 0
    """Number of violations of invariants, without the kinds that the next three counters count."""
    lost_trajectories: int = 0
    """Number of trajectories that are neither trained nor dropped nor open."""
    trained_twice: int = 0
    """Number of groups in two committed steps."""
    orphans: int = 0
    """Number of processes, files and Slurm jobs that a run left behind."""
    both_resident: int = 0
    """Number of times that a trainer and a guest had tensors resident on one node."""

    @property
    def problems(self) -> int:
        """Number of problems of all kinds."""
        return self.violations + self.lost_trajectories + self.trained_twice + self.orphans + self.both_resident

    def violate(self, what: str) -> None:
        self.violations += 1
        print(f"VIOLATION {what}", flush=True)


class ManagerRestarter:
    """Starts another manager after one was killed. On Slurm, the manager's pending job takes over instead."""

    def __init__(self, run: TestRun) -> None:
        self._run, self._over = run, threading.Event()
        self._thread = threading.Thread(target=self._restart_managers, daemon=True)
        self._thread.start()

    def _restart_managers(self) -> None:
        manager: subprocess.Popen[str] | None = None
        while not self._over.wait(0.5):
            held = holder(self._run.run)
            dead = held is None or read_process(held.pid) is None
            if dead and self._run.state().outcome is None and (manager is None or manager.poll() is not None):
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                manager = self._run.call("manage", self._run.run.id, **quiet)
        if manager is not None:
            manager.wait(timeout=60)

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=90)


def performed(run: RunDir) -> list[ev.FaultInjected]:
    """Return one event for each fault that was carried out."""
    event_text = [stamped.event for stamped in replay(run)]
    return [event for event in event_text if isinstance(event, ev.FaultInjected) and event.ok and not event.ended]


def run_faults(run: TestRun, faults: int, tally: Tally, restarter: ManagerRestarter | None) -> None:
    """Wait until the run's faults were injected, end the run, and check its directory and remaining processes."""
    done, since = 0, time.monotonic()
    while done < faults and time.monotonic() < since + SPELL:
        time.sleep(1.0)
        now = len(performed(run.run))
        if now > done:
            done, since = now, time.monotonic()
        if run.state().outcome is not None:
            break
    state = run.state()
    message = f"{done} faults, {state.recoveries} recoveries, step {state.step}, epoch {state.epoch}"
    print(f"{run.run.id}: {message}", flush=True)
    tally.faults += done
    if done < faults:
        tally.violate(f"{run.run.id} injected no more faults, or ended: {state.outcome} {state.why}")
    _end(run, tally)
    if restarter is not None:
        restarter.close()
    judge(run, tally)


def _end(run: TestRun, tally: Tally) -> None:
    if run.state().outcome is None:
        before = run.state()
        try:
            run.wait(lambda state: state.step > before.step, 4 * TIMEOUT_S)  # the run's faults continue until it ends
        except AssertionError as error:
            tally.violate(f"{run.run.id} does not work again: {str(error)[:2000]}")
        # If a fault kills the manager at this moment, the command reports that there is no manager, and leaves its
        # request for the next manager.
        run.call("cancel", run.run.id, stdout=subprocess.DEVNULL).wait(timeout=4 * TIMEOUT_S)
        try:
            run.wait(lambda state: state.outcome is not None, 4 * TIMEOUT_S)
        except AssertionError as error:
            tally.violate(f"{run.run.id} could not be cancelled: {str(error)[:2000]}")
    if (outcome := run.state().outcome) is not Outcome.CANCELLED:
        tally.violate(f"{run.run.id} ended as {outcome}: {run.state().why}")


def judge(run: TestRun, tally: Tally) -> None:
    """Check every invariant of docs/architecture.md that can be checked after the end."""
    _trajectories(run.run, tally)
    _records(run.run, tally)
    until = time.monotonic() + 60
    while (left := dict(processes_of(run.run))) and time.monotonic() < until:
        time.sleep(0.2)
    files = [path for at in ("/tmp", "/dev/shm", "/run") for path in Path(at).glob(f"*{run.run.id}*")]
    for one in (*left.items(), *files):
        tally.orphans += 1
        print(f"ORPHAN {one}", flush=True)


def _trajectories(run: RunDir, tally: Tally) -> None:
    """Check in the store's log that no trajectory is lost and no group is trained twice (invariant 1).

    The store writes audit.json when it is stopped. There is none if a fault killed the store just before the run ended.
    """
    fates = _audit_of_log(run)
    written = run.store / "audit.json"
    if written.exists():
        stored = msgspec.structs.replace(msgspec.json.decode(written.read_bytes(), type=Audit), episodes={})
        if stored != fates:
            tally.violate(f"audit.json of {run.id} differs from the log: {stored} instead of {fates}")
    missing = fates.made - fates.trained - sum(fates.dropped.values()) - fates.open
    groups = Counter(group for number, step in fates.steps.items() if number <= fates.committed for group in step)
    twice = sum(count - 1 for count in groups.values())
    tally.lost_trajectories += abs(missing)
    tally.trained_twice += twice
    if missing or twice:
        print(f"TRAJECTORIES of {run.id}: {missing} missing, {twice} groups trained twice", flush=True)


def _audit_of_log(run: RunDir) -> Audit:
    """Compute the audit from the newest log that the store left; a log is empty until its store has opened it."""
    logs = [log for log in run.store.glob("log.*") if log.suffix[1:].isdecimal() and log.stat().st_size]
    return audit(map(decode, read_frames(max(logs, key=lambda log: int(log.suffix[1:])))))


class _Reading:
    """State of reading the records of a run."""

    def __init__(self, run: RunDir, tally: Tally) -> None:
        self.run, self.tally = run, tally
        self.joined: dict[ReplicaId, int] = {}
        self.intended: set[str] = set()
        self.admitted: dict[str, tuple[NodeName, int]] = {}
        self.failing: set[Incarnation] = set()
        self.bad_nodes: set[NodeName] = set()
        self.committed = 0
        self.epoch = 0

    def read(self, stamped: ev.Stamped) -> None:
        event, say = stamped.event, self.tally.violate
        if stamped.epoch < self.epoch:
            say(f"{self.run.id}: a record of epoch {stamped.epoch} follows a record of epoch {self.epoch}")
        self.epoch = stamped.epoch
        match event:
            case ev.Intended(action) | ev.Decided(action):
                if not action.why.evidence:
                    say(f"{self.run.id}: no evidence for {action}")  # invariant 6
                if isinstance(action, Launch) and action.standby is None:
                    if action.tag in self.intended:
                        say(f"{self.run.id}: {action.tag} is launched twice")  # invariant 3
                    self.intended.add(action.tag)
                if isinstance(action, Fence):
                    self._fence(action)
            case ev.Joined(incarnation):  # invariant 2
                if incarnation.number < self.joined.get(incarnation.replica, 0):
                    say(f"{self.run.id}: {incarnation} joins after incarnation {self.joined[incarnation.replica]}")
                self.joined[incarnation.replica] = incarnation.number
            case ev.Admitted(_, step, node, pid):
                if self.admitted.setdefault(step, (node, pid)) != (node, pid):
                    say(f"{self.run.id}: two processes are admitted as {step}")
            case ev.StepEnded(incarnation):
                self.failing.add(incarnation)
            case ev.FindingChanged(finding):
                if finding.verdict is Verdict.FAIL and finding.incarnation is not None:
                    self.failing.add(finding.incarnation)
                elif finding.verdict is Verdict.FAIL and finding.node is not None:
                    self.bad_nodes.add(finding.node)
            case ev.StepCommitted(_, step):
                if self.committed and step > self.committed + 2:  # one may be unreported, if a trainer died
                    say(f"{self.run.id}: step {step} is committed after {self.committed}")
                self.committed = max(self.committed, step)
            case ev.ManagerStarted():
                self.committed = 0  # commits without a manager were not reported
            case _:
                pass

    def _fence(self, fence: Fence) -> None:
        """Check invariant 4: a fence names a failure of the incarnation or its node.

        A fence without a failure must name the gang, the node, or the user who requested it.
        """
        incarnation = fence.incarnation
        if fence.charged and incarnation not in self.failing and role_of(incarnation.replica) not in SUPPORT_ROLES:
            message = " ".join(fence.why.evidence)
            if not any(node in message for node in self.bad_nodes) and "no longer part" not in message:
                self.tally.violate(f"{self.run.id}: {incarnation} is fenced although it had not failed: {message}")
        if (
            not fence.charged
            and gang_of(incarnation.replica) == incarnation.replica
            and role_of(incarnation.replica) == "trajectories"
        ):
            self.tally.violate(f"{self.run.id}: the store was moved: {fence.why.evidence}")


def _records(run: RunDir, tally: Tally) -> None:
    reading, records = _Reading(run, tally), list(replay(run))
    for stamped in records:
        reading.read(stamped)
    try:
        assert_explained(records)
    except AssertionError as error:
        tally.violate(f"{run.id}: a decision is not explained: {error}")


def light(faults: int, runs: int, tally: Tally) -> None:
    for seed in range(runs):
        folder = Path(tempfile.mkdtemp(prefix="rrl-soak-"))
        before = tally.problems
        extra = LIGHT.format(phases=HANGS, seed=seed, agent=f"agent/local{seed + 1}")
        elastic = seed == ELASTIC_RUN
        rollouts, step_seconds = (2, 0.02) if elastic else (3, 0.1)  # the trainer of the elastic run must wait
        extra += ELASTIC if elastic else ""
        toml = light_job("local", STEPS, rollouts=rollouts, spares=2, step_seconds=step_seconds, extra=extra)
        if elastic:  # what the light rollouts lease: the pool gets no more replicas than have work
            toml = toml.replace("[roles.rollout]\n", "[roles.rollout]\nlease = 8\n")
        if seed % 2:
            toml = toml.replace("[roles.trainer]\n", "[roles.trainer]\nranks = 2\n")
        run = submit_to(PREEMPTED, folder, toml) if elastic else submit_here(folder, toml)
        run.wait(lambda state: state.epoch > 0)
        restarter = ManagerRestarter(run)  # before the first step, since a fault may kill the manager earlier
        _begin(run)
        run_faults(run, -(-faults // runs), tally, restarter)
        if elastic:
            _check_preemptions(run, tally)
        if tally.problems > before:
            print(f"kept for a look: {folder}", flush=True)
        else:
            shutil.rmtree(folder)


def _check_preemptions(run: TestRun, tally: Tally) -> None:
    """Check that the elastic pool grew and lost nodes, so that this run has tested something."""
    resizes = [one.event.action for one in run.events() if isinstance(one.event, ev.Decided)]
    if not any(isinstance(one, Resize) and one.start for one in resizes):
        tally.violate(f"{run.run.id}: the elastic pool never grew")
    if not any(isinstance(one, Resize) and one.stop for one in resizes):
        tally.violate(f"{run.run.id}: the elastic pool never lost a node")


def _begin(run: TestRun) -> None:
    run.wait(_began)


def _began(state: State) -> bool:
    return state.step >= 1


def agents(faults: int, tally: Tally) -> None:
    """Inject faults into a run whose agents make streamed calls in all forms."""
    folder, before = Path(tempfile.mkdtemp(prefix="rrl-soak-")), tally.problems
    (folder / "streaming_task.py").write_text(STREAMING)
    own = ('function = "guess_task:run"', 'function = "streaming_task:run"')
    run = submit_agents_example(
        folder, STEPS, 1, own, *WITHOUT_MODEL, ('silence = "5s"', f'silence = "5s"\nfirst_pass = "2s"{AGENTS}')
    )
    restarter = ManagerRestarter(run)
    _begin(run)
    run_faults(run, faults, tally, restarter)
    if (errors := folder / "errors.txt").exists():
        tally.violate(f"{run.run.id}: calls of agents failed: {errors.read_text()[:2000]}")
    if drift := run.summary().get("token_drift"):
        tally.violate(f"{run.run.id}: {drift} trained tokens differ from what was sampled")
    if tally.problems == before:
        shutil.rmtree(folder)


def lending(faults: int, tally: Tally) -> None:
    """Kill and stop members of the trainer, guests, the store and the manager of a run that lends."""
    folder, before, rng = Path(tempfile.mkdtemp(prefix="rrl-soak-")), tally.problems, random.Random(faults)
    with LendingRun(folder, STEPS, tags=LENDING_TAGS, recovery=LENDING) as run:
        run.wait(lambda state: state.epoch > 0)
        restarter = ManagerRestarter(run.test)
        run.wait(_began)
        kinds, step, since = Counter[str](), 0, time.monotonic()
        while kinds.total() < faults and run.test.state().outcome is None:
            time.sleep(rng.uniform(1.0, 6.0))
            kinds += _injure(run, rng)
            if (now := run.test.state().step) > step:
                step, since = now, time.monotonic()
            elif time.monotonic() > since + SPELL:
                tally.violate(f"{run.test.run.id} commits no step after {step}")
                break
        awake = sum(one["event"] == "wake" for one in fake_gpu.events(run.gpu))
        print(f"{run.test.run.id}: {dict(kinds)}, {run.test.state().recoveries} recoveries, step {step}, {awake} wakes")
        tally.faults += kinds.total()
        if kinds.total() < faults or not awake:
            tally.violate(f"{run.test.run.id} ended, or never lent: {run.test.state().why}")
        _end(run.test, tally)
        restarter.close()
        judge(run.test, tally)
        tally.both_resident += len(found := fake_gpu.violations(run.gpu))
        print("".join(f"BOTH RESIDENT {one}\n" for one in found), end="", flush=True)
        try:
            run.check_trained()
        except AssertionError as error:
            tally.violate(f"{run.test.run.id}: {error}")
    if tally.problems > before:
        print(f"kept for a look: {folder}", flush=True)
    else:
        shutil.rmtree(folder)


def _injure(run: LendingRun, rng: random.Random) -> Counter[str]:
    """Kill or stop one process of a run that lends; return what was done, nothing if its victim does not run."""
    role = rng.choices(("guest", "trainer", "store", "manager"), (5, 3, 1, 1))[0]
    if role == "manager":
        if (held := holder(run.test.run)) is None or read_process(held.pid) is None:
            return Counter()
        os.kill(held.pid, signal.SIGKILL)
        return Counter(["kill manager"])

    def meant(one: Replica) -> bool:
        id = one.id
        return (id == STORE, is_trainer(id), role_of(id) == GUEST_ROLE)[("store", "trainer", "guest").index(role)]

    victims = [one for one in run.test.state().replicas.values() if meant(one) and one.status is Status.JOINED]
    if not victims or (pid := rng.choice(victims).pid) is None or (process := read_process(pid)) is None:
        return Counter()
    stop = rng.random() < 0.3
    os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
    if stop:
        threading.Timer(rng.uniform(0.5, 8.0), _go_on, (pid, process.started)).start()
    return Counter([f"{'stop' if stop else 'kill'} {role}"])


def _go_on(pid: int, started: int) -> None:
    """Let a stopped process go on, if it was not killed meanwhile."""
    if (process := read_process(pid)) is not None and process.started == started:
        os.kill(pid, signal.SIGCONT)


def torch(faults: int, tally: Tally) -> None:
    with SlurmLab.start(nodes=TORCH_NODES) as lab:
        toml = QUICKSTART.read_text().partition("[[faults.planned]]")[0]
        for old, new in (('kind = "local"', 'kind = "slurm"'), ("steps = 300", f"steps = {STEPS}")):
            assert old in toml, f"the quickstart does not contain {old}"
            toml = toml.replace(old, new)
        run = submit_on(lab, "soak", toml + TORCH)
        _begin(run)
        run_faults(run, faults, tally, None)
        deadline = time.monotonic() + COMPLETING_TIMEOUT_S
        while (jobs := lab.jobs()) and all(job.endswith("COMPLETING") for job in jobs) and time.monotonic() < deadline:
            time.sleep(0.5)
        if jobs:
            tally.orphans += len(jobs)
            print(f"ORPHANS in the queue: {jobs}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--light", type=int, default=LIGHT_FAULTS, help="number of faults on light workers")
    parser.add_argument("--agents", type=int, default=AGENTS_FAULTS, help="number of faults on a run with agents")
    parser.add_argument("--lending", type=int, default=LENDING_FAULTS, help="number of faults on a run that lends")
    parser.add_argument("--torch", type=int, default=TORCH_FAULTS, help="number of faults on torch roles under Slurm")
    options = parser.parse_args()
    exit_on_sigterm()
    tally = Tally()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    if options.light:
        light(options.light, LIGHT_RUNS, tally)
    if options.agents:
        agents(options.agents, tally)
    if options.lending:
        lending(options.lending, tally)
    if options.torch:
        torch(options.torch, tally)
    result = msgspec.structs.asdict(tally)
    print(json.dumps(result))
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
