"""Only :mod:`rrl.core.command_runner`, which enforces deadlines, and the modules in ``STARTERS`` start processes.

Each module in ``STARTERS`` supervises processes that outlive the call that starts them.
"""

from __future__ import annotations

import ast
from pathlib import Path

from rrl.tests.support.syntax_tree import parse

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "cli", "cluster", "config", "core", "health", "manager", "roles", "slurm_templates", "transport")
STARTS = frozenset(
    {
        "asyncio.create_subprocess_exec",
        "asyncio.create_subprocess_shell",
        "subprocess.Popen",
        "subprocess.call",
        "subprocess.check_call",
        "subprocess.check_output",
        "subprocess.run",
    }
)
STARTERS = {
    "cli/results/track.py": "the process of a tracker, which the command waits for",
    "core/command_runner.py": "commands with a deadline",
    "health/readers/isolation/client.py": "the readers of a node, which run as long as their client",
    "manager/bootstrap/pool_supervisor.py": "the manager of a run",
    "cluster/local.py": "first processes of steps, which outlive the manager",
    "cluster/slurm/readers/child_process.py": "the process that uses pyslurm, as long as its manager",
    "cluster/slurm/steps.py": "sruns, which are killed once their step has connected",
    "manager/tracking/tracker_supervisor.py": "the process of a tracker, as long as the manager of the run",
    "manager/execute/checkpoint_exports.py": "an export, which ends when its stdin is closed, and may take an hour",
    "roles/node_agent/fault_injection.py": "a pause helper, which reports twice and outlives the agent",
    "roles/agents/user_program.py": "the user's agent, which may run for as long as an attempt",
    "roles/endpoint/preparation_processes.py": "processes that prepare calls, each as long as it does so in time",
    "roles/launcher/process_group.py": "the command of a role",
}
"""The modules that may start processes, each with the processes that it starts."""


def starts_of(source: str) -> list[int]:
    """Return the lines on which a module starts a process."""
    calls = (node for node in ast.walk(parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if ast.unparse(call.func) in STARTS]


def test_commands_are_only_started_by_the_command_runner() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix() for path in files if starts_of(path.read_text())}
    assert found == set(STARTERS)


def test_call_that_starts_a_process_is_found() -> None:
    assert starts_of("import subprocess\nchild = subprocess.Popen(['true'])\n") == [2]
    assert starts_of("async def f():\n    await asyncio.create_subprocess_exec('true')\n") == [2]
    assert starts_of("run(['true'], 1.0)\n") == []
