"""Runs each arm of benchmarks/ettr.py under each plan of faults on a real Slurm, after a pilot that sets their pace."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rrl.benchmarks._ettr_arms import ARMS, BALANCED, Arm, Workload, job
from rrl.benchmarks._ettr_faults import Target, run_to_end, schedule
from rrl.benchmarks._ettr_figures import Sample, account_of, commits_of, outages
from rrl.benchmarks._pace import overrun, recorded
from rrl.benchmarks._provenance import raw_samples
from rrl.benchmarks._stream_task import write_model
from rrl.core.types import Outcome
from rrl.tests.support.runs import submit_on
from rrl.tests.support.slurm.lab import SlurmLab

STEPS, FAULTS = 100, 10
PILOT_STEP_S, PILOT_STEPS, PILOT_FAULTS = 1.0, 16, 2
TARGET_JOB_STRICT = 0.60
UNCOMMITTED = 1
"""Number of steps without a commit that the trainer may have: the default of ``[roles.trainer] uncommitted``."""
RUN_TIMEOUT_S = 1800.0


class Plan(Struct, frozen=True):
    """The settings that all runs of a comparison share; the runs differ in arm and seed."""

    name: str
    steps: int
    faults: int
    workload: Workload = BALANCED
    targets: tuple[Target, ...] = (Target.TRAINER,)
    step_factor: float = 1.0
    """Length of a step, divided by the length that the pilot has set."""

    @property
    def clean(self) -> str:
        """A text with all settings on which a run without faults depends. Plans with equal texts share clean runs."""
        return f"{self.workload.name}, {self.steps} steps x {self.step_factor:g}"


@dataclass
class Runs:
    """Makes runs, and keeps their samples in memory and in a file."""

    lab: SlurmLab
    step_s: float = PILOT_STEP_S
    samples: list[Sample] = field(default_factory=list)
    requeue_s: dict[str, list[float]] = field(default_factory=dict)
    """Outages (s) of the arms in which Slurm restarts the job."""
    raw: Path | None = None
    """File of the samples; None before they are saved for the first time."""
    _model: Path | None = None

    def load(self, earlier: Path) -> None:
        """Continue from the samples of a benchmark that was stopped, at the pace that its pilot has set."""
        content = json.loads(earlier.read_text())["samples"]
        self.step_s, self.requeue_s = content["step_s"], content["requeue_s"]
        self.samples = msgspec.convert(content["runs"], list[Sample])

    def save(self) -> Path:
        """Write all samples to the file; return its path."""
        content = {"step_s": self.step_s, "requeue_s": self.requeue_s, "runs": msgspec.to_builtins(self.samples)}
        self.raw = raw_samples("ettr", content, self.raw)
        return self.raw

    def measure(self, plan: Plan, arm: Arm, seed: int = 0) -> Sample:
        """Run one arm to its end, and keep its sample."""
        sample = self._measure(plan, arm, seed, self.step_s * plan.step_factor)
        self.samples.append(sample)
        self.save()
        return sample

    def measure_all(self, plan: Plan, arms: Iterable[Arm], seed: int = 0) -> None:
        """Run the clean run of the plan and then each arm; leave out runs whose sample exists."""
        for arm in (ARMS["clean"], *arms):
            if not any(
                (each.arm, each.seed) == (arm.name, seed)
                and (each.clean == plan.clean if arm.name == "clean" else each.plan == plan.name)
                for each in self.samples
            ):
                self.measure(plan, arm, seed)

    def pilot(self) -> None:
        """Set the length of a step (s) with which the arm ``job`` should have the strict ETTR that is its target.

        The plan has one fault in every ten steps. A fault costs ``job`` an outage, which does not depend on the length
        of a step, and repeated work, which grows with this length.
        """
        plan = Plan("pilot", PILOT_STEPS, PILOT_FAULTS)
        clean, failing = (self._measure(plan, ARMS[arm], 0, PILOT_STEP_S) for arm in ("clean", "job"))
        outage_s = statistics.mean(outage.seconds for outage in failing.outages)
        cost = (failing.seconds - clean.seconds) / PILOT_FAULTS
        again = max(0.0, (cost - outage_s) / PILOT_STEP_S)
        per_fault = STEPS / FAULTS * (1 / TARGET_JOB_STRICT - 1)
        self.step_s = round(outage_s / (per_fault - again), 3)
        print(
            f"pilot: outages of {outage_s:.2f} s, {again:.2f} repeated steps; set steps to {self.step_s} s", flush=True
        )

    def _measure(self, plan: Plan, arm: Arm, seed: int, step_s: float) -> Sample:
        faults = schedule(plan.steps, plan.faults, seed, plan.targets) if arm.faults else []
        name = f"{plan.name}-{arm.name}-{seed}".replace(" ", "-").replace("%", "pc")
        record = self.lab.user_home / f"{name}-pace"
        self.lab.call_as_user(record.mkdir)
        model = self._tail_model() if plan.workload.tail else None
        toml = job(arm, "slurm", plan.steps, step_s, seed, record, plan.workload, model)
        run = submit_on(self.lab, name, toml)
        state, kills = run_to_end(run, self.lab, faults, step_s, RUN_TIMEOUT_S)
        assert state.outcome is Outcome.COMPLETED, f"{name}: {state.outcome}: {state.why}"
        assert len(kills) == len(faults), f"{name}: {len(kills)} of {len(faults)} faults"
        events = run.events()
        began, commits = commits_of(events)
        run.wait_gone(120.0)
        self.lab.clear()
        sample = Sample(
            arm.name,
            seed,
            round(commits[-1] - began, 3),
            tuple(round(at - began, 3) for at in commits),
            outages(run.run, events, kills, UNCOMMITTED),
            (round(overrun(recorded(record, "trainer")), 4), round(overrun(recorded(record, "rollout")), 4)),
            round(os.getloadavg()[0], 1),
            tuple((round(kill.at - began, 2), kill.target.value) for kill in kills),
            plan.name,
            plan.clean,
            account_of(events, began),
        )
        print(
            f"{plan.name}: {arm.name}, seed {seed}: {sample.seconds:.1f} s, "
            f"outages {[outage.seconds for outage in sample.outages]}, "
            f"overrun {sample.overrun}, load {sample.load}",
            flush=True,
        )
        return sample

    def _tail_model(self) -> Path:
        """Return the model of workloads with a long tail; train it at the first call."""
        if self._model is None:
            self._model = self.lab.dir / "tail-model"
            write_model(self._model)
            for path in self._model.iterdir():
                path.chmod(0o644)  # the lab's user reads it; safetensors makes files private to their owner
        return self._model


def checkpointed(arm: Arm, every: int) -> Arm:
    """Return the arm, changed to write one checkpoint in every ``every`` steps."""
    return replace(arm, name=f"{arm.name}, checkpoint every {every}", checkpoint_every=every)
