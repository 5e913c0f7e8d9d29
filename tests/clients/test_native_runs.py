"""Codex and Claude Code, as ``[roles.agents] command``, in whole runs whose rollout dies in the middle."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from rrl.benchmarks._clients_scene import MAX_LENGTH, MAX_NEW
from rrl.benchmarks._clients_table import Client, installed
from rrl.core.types import ReplicaId
from rrl.tests.support.roles.endpoint.tool_folders import make
from rrl.tests.support.runs import LIGHT, all_work, check_sound, submit_here

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

TIMEOUT_S = 240.0
ROLLOUT = ReplicaId("rollout/0")
STEPS, GROUP = 2, 2
JOB = """
[run]
name = "native"
steps = {steps}
[cluster]
kind = "local"
spares = 0
node = {{ cpus = 8, mem = "8GiB" }}
[model]
path = "model"
chat = true
max_length = {max_length}
[task]
function = "light_task:make"
[sampling]
prompts_per_step = 1
group_size = {group}
max_new_tokens = {max_new}
[roles.agents]
command = {command}
concurrency = 1
[roles.trainer]
exclusive = false
warm = false
command = ["{python}", "{light}/light_trainer.py"]
mem = "256MiB"
[roles.rollout]
exclusive = false
command = ["{python}", "{light}/scripted_turn_rollout.py", "{name}"]
mem = "512MiB"
[recovery]
backoff = "0s"
"""


@pytest.mark.parametrize("client", [pytest.param(each, id=each.name) for each in installed() if each.binary])
def test_native_agent_is_trained_although_the_rollout_dies(client: Client, tmp_path: Path) -> None:
    settings_file = make(tmp_path / "model") / "config.json"
    settings_file.write_text(settings_file.read_text().replace("8192", str(MAX_LENGTH)))
    settings = {"steps": STEPS, "group": GROUP, "max_length": MAX_LENGTH, "max_new": MAX_NEW}
    command = json.dumps(list(client.command))
    run = submit_here(
        tmp_path, JOB.format(**settings, command=command, python=sys.executable, light=LIGHT, name=client.name)
    )
    pid = run.wait(lambda state: all_work(state) and state.step >= 1, TIMEOUT_S).replica(ROLLOUT).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    summary = run.summary()
    assert (summary["token_drift"], summary["untrained_turns"], summary["branches"]) == (0, 0, STEPS * GROUP)
    assert summary["turns"] == STEPS * GROUP * len(client.answers)
