"""The double of a node's GPUs finds two processes that have tensors resident at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.tests.support import fake_gpu

_PROGRAM = """
import sys
from pathlib import Path
from rrl.tests.support.fake_gpu import _Memory
memory = _Memory(Path(sys.argv[1]))
for line in sys.stdin:
    method, event = line.split()
    getattr(memory, method)(event)
    print(flush=True)
"""


def _process(folder: Path, replica: str) -> subprocess.Popen[str]:
    launch = folder / f"{replica.replace('/', '-')}.json"
    launch.write_text(json.dumps({"incarnation": {"replica": replica, "number": 1}, "node": "n1"}))
    argv, env = [sys.executable, "-c", _PROGRAM, str(folder)], {**os.environ, "RRL_LAUNCH": str(launch)}
    return subprocess.Popen(argv, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _say(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{words}\n")
    process.stdin.flush()
    process.stdout.readline()


def test_two_residents_on_a_node_are_a_violation_and_a_dead_one_is_none(tmp_path: Path) -> None:
    with _process(tmp_path, "trainer/0") as trainer, _process(tmp_path, "guest/n1") as guest:
        _say(trainer, "take load")
        _say(trainer, "release dropped")
        _say(guest, "take wake")
        assert fake_gpu.violations(tmp_path) == []
        _say(trainer, "take restore")
        assert trainer.wait(60) == fake_gpu.EXIT_CODE
        with _process(tmp_path, "trainer/0") as following:
            guest.kill()
            guest.wait()
            _say(following, "take load")
            following.kill()
    [violation] = fake_gpu.violations(tmp_path)
    assert "trainer/0#1 on n1: restore" in violation
    assert [one["event"] for one in fake_gpu.events(tmp_path)] == ["load", "dropped", "wake", "restore", "load"]


@pytest.mark.parametrize(("replica", "found"), [("guest/n1", 1), ("rollout/0", 0)])
def test_use_without_residence_is_a_violation_of_those_who_share(tmp_path: Path, replica: str, found: int) -> None:
    with _process(tmp_path, replica) as process:
        _say(process, "check step")
        process.kill()
    assert len(fake_gpu.violations(tmp_path)) == found


def test_planted_fault_happens_once(tmp_path: Path) -> None:
    planted = fake_gpu.plant(tmp_path, "wake", "n1", "kill")
    with _process(tmp_path, "guest/n1") as guest:
        _say(guest, "take wake")
        assert guest.wait(60) == -9
    assert not planted.exists()
