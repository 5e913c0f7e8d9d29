"""Records the output of the real pyslurm and of Slurm's commands, for the tests that run without pyslurm.

    python -m rrl.tests.support.slurm_readers.recording

The program starts a lab, brings it into every state, reads it both ways at the same moments, and writes
``tests/data/recorded/pyslurm/VERSION.json``. pyslurm must match the Slurm of the lab (:mod:`.pyslurm_pair`). Only
processes that are forked for this purpose import pyslurm.
"""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from rrl.cluster.slurm import parsing
from rrl.tests.support.plain_user import call_as
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.slurm_readers.cluster_states import DRAINED, states
from rrl.tests.support.slurm_readers.fake_pyslurm import JOB_ATTRIBUTES, NODE_ATTRIBUTES, STEP_ATTRIBUTES
from rrl.tests.support.slurm_readers.pyslurm_pair import mismatch

FOLDER = Path(__file__).parents[2] / "data" / "recorded" / "pyslurm"
COMMANDS = {
    "jobs": ("squeue", "--me", "-h", "-t", "all", "-o", parsing.JOBS_FORMAT),
    "steps": ("squeue", "--me", "-h", "-s", "-o", parsing.STEPS_FORMAT),
    "nodes": ("scontrol", "show", "node", "-o"),
    "config": ("scontrol", "show", "config"),
}
_CONFIG_KEYS = ("SLURM_VERSION", "InactiveLimit")


def main() -> int:
    """Record all moments; return the exit code."""
    if reason := mismatch():
        print(f"nothing was recorded: {reason}", file=sys.stderr)
        return 2
    recording: dict[str, Any] = {"moments": {}, "errors": {}}
    with SlurmLab.start(nodes=5, preempting=6) as lab, tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)  # the plain user writes there
        answer = Path(folder) / "answer.json"

        def record(moment: str) -> None:
            lab.call_as_user(lambda: _write(answer, _objects()))
            recording["moments"][moment] = msgspec.json.decode(answer.read_bytes())
            answer.unlink()

        with states(lab, record):
            lab.call_as_user(lambda: _write(answer, _errors(DRAINED)))
            own = msgspec.json.decode(answer.read_bytes())
            answer.unlink()
            call_as(getpass.getuser(), lambda: _write(answer, _errors("nowhere")), lab.environment(), lab.dir, 60.0)
            admin = msgspec.json.decode(answer.read_bytes())
            answer.unlink()
            recording["errors"] = {
                "drain_not_permitted": own["drain"],
                "drain_unknown_node": admin["drain"],
                "load_unknown_node": own["load"],
            }
            with lab.controller_down():
                lab.call_as_user(lambda: _write(answer, _errors(DRAINED)))
            recording["errors"]["controller_away"] = msgspec.json.decode(answer.read_bytes())["drain"]
        any_moment = next(iter(recording["moments"].values()))
        recording |= {key: any_moment.pop(key) for key in ("pyslurm", "user")}
        for moment in recording["moments"].values():
            moment.pop("pyslurm", None)
            moment.pop("user", None)
        version = f"{lab.version[0]}.{lab.version[1]:02}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{version}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(recording), indent=1) + b"\n")
    print(f"wrote {path}: {', '.join(recording['moments'])}")
    return 0


def _objects() -> dict[str, Any]:
    """Return the attributes of all objects and the output of the commands."""
    import pyslurm

    found: dict[str, Any] = {
        "jobs": [_attributes(job, JOB_ATTRIBUTES) for job in pyslurm.Jobs.load().values()],
        "steps": [
            {"job": job} | _attributes(step, STEP_ATTRIBUTES)
            for job, steps in pyslurm.JobSteps.load_all().items()
            for step in steps.values()
        ],
        "nodes": [_attributes(node, NODE_ATTRIBUTES) for node in pyslurm.Nodes.load().values()],
        "config": {key: pyslurm.config().get()[key] for key in ("version", "inactive_limit")},
        "pyslurm": pyslurm.__version__,
        "user": os.geteuid(),
    }
    env = dict(os.environ) | {"SLURM_TIME_FORMAT": "%s"}
    plain = dict(os.environ)
    found["commands"] = {
        name: subprocess.run(
            argv, env=env if argv[0] == "squeue" else plain, capture_output=True, check=True
        ).stdout.decode(errors="replace")
        for name, argv in COMMANDS.items()
    }
    lines = found["commands"]["config"].splitlines()
    found["commands"]["config"] = "\n".join(line for line in lines if line.startswith(_CONFIG_KEYS)) + "\n"
    return found


def _errors(node: str) -> dict[str, Any]:
    """Return the numbers and texts of the errors for a drain of this node, and for a node that does not exist."""
    import pyslurm

    found = {}
    try:
        pyslurm.Node(node).modify(pyslurm.Node(state="DRAIN", reason="rrl:readers:test"))
    except pyslurm.RPCError as error:
        found["drain"] = [error.errno, str(error)]
    try:
        pyslurm.Node.load("nowhere")
    except pyslurm.RPCError as error:
        found["load"] = [error.errno, str(error)]
    return found


def _attributes(value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = getattr(value, name)
        except UnicodeDecodeError as error:
            found[name] = {"bytes": error.object.hex()}
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.encode(value))


if __name__ == "__main__":
    sys.exit(main())
