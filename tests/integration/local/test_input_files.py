"""A file of prompts that changes during a run ends the run, before an answer is scored against another row."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from rrl.tests.support.runs import TestRun, check_sound, light_job, submit_here


def _rows(digits: range) -> str:
    """Return 50 rows whose right answers are four equal digits; the light rollouts repeat the digit of the prompt."""
    return "".join(json.dumps({"question": str(i), "answer": str(digits[i]) * 4}) + "\n" for i in [*range(10)] * 5)


def _resumed(run: TestRun) -> tuple[int, str]:
    process = run.call("resume", run.run.id, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=180)
    return process.returncode, err


def test_changed_prompts_end_the_run_and_restored_ones_continue_it(tmp_path: Path) -> None:
    right, wrong = _rows(range(10)), _rows(range(9, -1, -1))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(right)
    toml = light_job("local", 40, rollouts=1, spares=0, warm=False, one_node=True)
    run = submit_here(tmp_path, toml.replace('function = "light_task:make"', f'file = "{prompts.name}"'))
    step = run.wait_steps(2).step
    os.utime(prompts)  # the content stays
    run.wait_steps(step + 2)
    prompts.write_text(wrong)  # in place, so that processes that have opened the file read it
    state = run.wait_end()
    line = (
        f"{prompts} has changed since the run first read it ({len(right)} bytes then, {len(right)} other bytes now);"
        " restore it before a resume, or start a new run"
    )
    assert (state.outcome, state.why.partition("; rrl resume")[0]) == ("failed", line)
    run.wait_gone()

    assert _resumed(run) == (2, f"rrl: {line}\n")
    prompts.write_text(right)
    assert _resumed(run)[0] == 0
    run.wait_resumed()
    state = run.wait_end()
    assert (state.outcome, state.step, state.metrics["reward"]) == ("completed", 40, 1.0), state.why
    assert run.summary()["unscored_groups"] == 0
    run.wait_gone()
    check_sound(run.run)
