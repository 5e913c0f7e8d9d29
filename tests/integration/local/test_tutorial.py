"""The commands of docs/tutorial.md work in their order in one shell, on a real run with torch that survives a kill.

The run has half of the page's steps. They have fewer trajectories than those of the quickstart, and each takes longer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.tests.support.runs import check_records
from rrl.tests.support.slow_quickstart import slow_quickstart

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tutorial.md"
INSTALL = ["make setup", ". .venv/bin/activate"]
"""The commands of the page that set up an environment; the test leaves them out and uses its own environment."""
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
PAGE_STEPS, STEPS = 200, 100
TIMEOUT_S = 270


@pytest.mark.long  # test_quickstart.py plays the same job, and test_docs.py compares the commands with the program
@pytest.mark.torch
def test_the_commands_of_the_tutorial_do_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert COMMANDS[: len(INSTALL)] == INSTALL
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "quickstart.toml").write_text(slow_quickstart(examples, prompts=1, step_s=0.5))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, RUNS_ENV: str(tmp_path / "runs")}
    # the last command removes the run
    lines = [*COMMANDS[len(INSTALL) : -1], f"cp -r runs/*/journal .; {COMMANDS[-1]}"]
    script = "\n".join(f"echo '== {number}'\n{line}" for number, line in enumerate(lines))
    assert script.count(f"run.steps={PAGE_STEPS}") == 1
    script = script.replace(f"run.steps={PAGE_STEPS}", f"run.steps={STEPS}")
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = dict(zip(COMMANDS[len(INSTALL) :], re.split(r"^== \d+$", done.stdout, flags=re.MULTILINE)[1:], strict=True))
    assert "SIGKILL to process group" in shown["rrl inject tutorial kill --target rollout/1 --at step=20 --wait"]
    assert "rollout/1#1" in shown["rrl logs tutorial --failed"]
    explained = shown["rrl explain tutorial rollout/1"]
    assert re.search(r"replace rollout/1#1.*\n +because +ended by signal 9 \(SIGKILL\)", explained)
    # in a process that its node had prepared, if that was ready
    again = r"(joins again on local4|its standby process on local4 is promoted to rollout/1)"
    assert re.search(rf"expected +{again} by \S+: came after \S+,\s+rollout/1#2 joined", explained)
    assert f"completed, step {STEPS}/{STEPS}" in shown["rrl status tutorial --live"]
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == STEPS + 1
    assert "model.safetensors" in shown["ls model"]
    assert list((tmp_path / "runs").glob("tutorial-*")) == []
    check_records(RunDir(tmp_path))
