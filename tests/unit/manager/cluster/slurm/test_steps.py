"""The exact srun command of a step."""

from __future__ import annotations

from pathlib import Path

from rrl.core.types import NodeName, Resources
from rrl.manager.cluster.base import Step
from rrl.manager.cluster.slurm.commands import SlurmLimits
from rrl.manager.cluster.slurm.steps import Sruns

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
    assert line.endswith(" -P -m rrl.roles.agent.main /runs/r/steps/r.rollout-0.1.launch")


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
