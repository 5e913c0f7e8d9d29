"""The exact srun command of a step, and sruns that Slurm refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from rrl.cluster.base import Refused, RefusedForNow, Step
from rrl.cluster.slurm.commands import SlurmLimits
from rrl.cluster.slurm.steps import Sruns
from rrl.core.types import NodeName, Resources

FILES = Path("/runs/r/steps/r.rollout-0.1.launch"), Path("/runs/r/logs/100%.log")


def step(resources: Resources, *, agent: bool = False, container: tuple[str, ...] = (), python: str = "") -> Step:
    return Step("r.rollout-0.1", "r.pool", NodeName("n3"), resources, *FILES, agent, agent, container, python)


def command(launched: Step, *job: str) -> str:
    return " ".join(Sruns("/venv/bin/python", SlurmLimits()).command(job or ("--jobid=7",), launched))


def test_role_step_takes_its_share_under_the_nodes_own_limits() -> None:
    assert command(step(Resources(2, 1, 2**30))) == (
        "srun --jobid=7 --job-name=r.rollout-0.1 --nodes=1 --ntasks=1 --nodelist=n3 --exact --cpus-per-task=2"
        " --mem=1024M --gres=gpu:1 --mpi=none --kill-on-bad-exit=0 --no-kill --wait=0 --immediate=60 --export=NONE"
        " --propagate=NONE --input=none --output=/runs/r/logs/100%%.log.%t --chdir=/runs/r/steps --quiet"
        " /venv/bin/python -P -m rrl.roles.launcher.step /runs/r/steps/r.rollout-0.1.launch"
    )


def test_agent_step_overlaps_and_takes_no_memory() -> None:
    line = command(step(Resources(1, 8), agent=True))
    assert " --exact --overlap --cpus-per-task=1 --mem=0 --gres=gpu:8 " in line
    assert line.endswith(" -P -m rrl.roles.node_agent.main /runs/r/steps/r.rollout-0.1.launch")


def test_step_in_a_component_names_its_leader_and_number() -> None:
    line = command(step(Resources()), "--jobid=7", "--het-group=2")
    assert line.startswith("srun --jobid=7 --het-group=2 --job-name=")


def test_container_options_and_interpreter_precede_the_launch_file() -> None:
    options = ("--container-image=/i.sqsh", "--container-workdir=/job")
    line = command(step(Resources(), container=options, python="python3"))
    assert line.endswith(
        " --quiet --container-image=/i.sqsh --container-workdir=/job python3 -P -m rrl.roles.launcher.step"
        " /runs/r/steps/r.rollout-0.1.launch"
    )


# ── refused steps ────────────────────────────────────────────────────────────────────────────────────────────────────
LIMITS = SlurmLimits(step_retry_pause_s=0.05, step_retry_timeout_s=60.0, interpreter_watch_s=0.05)
MEMORY = "srun: error: Unable to create step for job 7: Memory required by task is not available"
NO_GRES = "srun: error: Unable to create step for job 7: Invalid generic resource (gres) specification"


class Refusing:
    """An srun that is refused ``times`` times with ``text``, and then starts the step."""

    def __init__(self, folder: Path, text: str, times: int, limits: SlurmLimits = LIMITS) -> None:
        self.calls, self.sruns = folder / "calls", Sruns("python", limits)
        log = folder / "step.log"
        self.step = msgspec.structs.replace(step(Resources(1)), launch_file=folder / "launch", log_file=log)
        (folder / "srun").write_text(
            f"#!/bin/sh\necho x >> {self.calls}\n"
            f"if [ $(wc -l < {self.calls}) -le {times} ]; then echo '{text}' >&2; exit 1; fi\n"
            f"touch {log}.0\nexec sleep 60\n"
        )
        (folder / "srun").chmod(0o755)

    async def start(self) -> bool:
        """Return whether the step is being started."""
        try:
            await self.sruns.start(("--jobid=7",), self.step)
            return self.step.tag in self.sruns and not self.sruns.failed
        finally:
            await self.sruns.close()

    def called(self) -> int:
        return len(self.calls.read_text().splitlines())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_step_that_is_refused_for_a_moment_is_started_under_the_same_tag(folder: Path) -> None:
    refusing = Refusing(folder, MEMORY, 3)
    assert asyncio.run(refusing.start())
    assert refusing.called() == 4


def test_step_that_stays_refused_for_now_fails_in_the_end(folder: Path) -> None:
    refusing = Refusing(folder, MEMORY, 1000, msgspec.structs.replace(LIMITS, step_retry_timeout_s=1.0))
    with pytest.raises(RefusedForNow, match="Memory required by task is not available"):
        asyncio.run(refusing.start())
    assert refusing.called() > 1


def test_step_that_can_never_be_created_is_refused_at_once(folder: Path) -> None:
    refusing = Refusing(folder, NO_GRES, 1000)
    with pytest.raises(Refused) as refused:
        asyncio.run(refusing.start())
    assert not isinstance(refused.value, RefusedForNow)
    assert refusing.called() == 1


def test_step_that_is_stopped_while_it_is_refused_is_not_started_any_more(folder: Path) -> None:
    refusing = Refusing(folder, MEMORY, 1000)

    async def stop() -> int:
        started = asyncio.create_task(refusing.start())
        while not refusing.calls.exists() or refusing.called() < 2:
            await asyncio.sleep(0.01)
        await refusing.sruns.kill(refusing.step.tag)
        await started
        return refusing.called()

    assert asyncio.run(stop()) == refusing.called()
