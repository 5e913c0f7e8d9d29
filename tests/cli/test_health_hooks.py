"""examples/health as scripts: what a tool that is broken, old, or stuck makes of them. In Slurm:
tests/lab/test_health_hooks.py."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/health"
_SCONTROL = """#!/bin/sh
[ "$1" = show ] && echo "   State=IDLE Reason=" && exit
echo "$@" >> {asked}
"""


def hook(name: str, tmp_path: Path, rrl: str) -> tuple[int, str, str]:
    """(exit code, what Slurm was asked for, what the system's log was told)"""
    for program, text in (
        ("rrl", rrl), ("scontrol", _SCONTROL.format(asked=tmp_path / "asked")),
        ("logger", f'#!/bin/sh\necho "$@" >> {tmp_path / "logged"}\n'),
    ):  # fmt: skip
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    script = (EXAMPLES / name).read_text().replace("RRL=/opt/rrl/bin/rrl ", f"RRL={tmp_path}/rrl ")
    script = script.replace("PATH=/usr/local/sbin:", f"PATH={tmp_path}:/usr/local/sbin:", 1)
    (tmp_path / name).write_text(script)
    done = subprocess.run(["sh", str(tmp_path / name)], env={}, cwd="/", capture_output=True, text=True, timeout=60)
    told = [(tmp_path / one).read_text() if (tmp_path / one).exists() else "" for one in ("asked", "logged")]
    return done.returncode, told[0], told[1]


FAILS = "#!/bin/sh\necho 'FAIL gpu_lost: GPU 1 does not answer the driver'\nexit 2\n"


def test_a_failure_fails_the_prolog_and_drains(tmp_path: Path) -> None:
    assert hook("prolog.sh", tmp_path, FAILS)[0] == 1
    code, asked, _ = hook("healthcheck.sh", tmp_path, FAILS)
    assert code == 0
    assert "state=drain reason=rrl:health: gpu_lost: GPU 1 does not answer the driver" in asked


@pytest.mark.parametrize("name", ["prolog.sh", "healthcheck.sh"])
@pytest.mark.parametrize(
    "rrl",
    [
        "#!/bin/sh\necho \"python3: can't open file\" >&2\nexit 2\n", "#!/bin/sh\nif\n", "#!/no/such/python\n",
        "#!/bin/sh\nkill -9 $$\n", "#!/bin/sh\necho 'Usage: rrl'\nexit 2\n",
    ],
)  # fmt: skip
def test_a_tool_that_does_not_run_drains_nobody_and_says_so(name: str, rrl: str, tmp_path: Path) -> None:
    code, asked, logged = hook(name, tmp_path, rrl)
    assert (code, asked) == (0, "")
    assert "this node was not checked" in logged


@pytest.mark.parametrize("name", ["prolog.sh", "healthcheck.sh"])
def test_a_reader_that_is_left_in_the_kernel_holds_nothing_up(name: str, tmp_path: Path) -> None:
    """It has stderr open."""
    pid = tmp_path / "pid"
    left = f"#!/bin/sh\necho noise >&2\nsleep 1000 >/dev/null &\necho $! > {pid}\n"
    code, asked, _ = hook(name, tmp_path, left + FAILS[10:])
    os.kill(int(pid.read_text()), signal.SIGKILL)  # it is there still
    assert code == 1 or "state=drain" in asked
