"""Recordings of real GPUs (``rrl.tests.support.nvml.record``) give the same readings from the fake driver.

The program that makes recordings is tested with the fake driver, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rrl.tests.support.nvml.driver import FakeDriver
from rrl.tests.support.nvml.reading import SECONDS, read_in_child
from rrl.tests.support.nvml.record import Recording, play

RECORDINGS = sorted((Path(__file__).parents[4] / "data" / "recorded" / "nvml").glob("*.json"))


def recorded(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "rrl.tests.support.nvml.record"]
    return subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, text=True, timeout=SECONDS)


def same(recording: Recording, folder: Path) -> None:
    """Check that the reader gets the recorded reading from a fake driver that replays the recording."""
    folder.mkdir()
    replayed = read_in_child(play(recording, folder).env())
    assert replayed.driver == recording.reading.driver
    for now, then in zip(replayed.gpus, recording.reading.gpus, strict=True):
        for field in set(then.__struct_fields__) - {"processes", "unread"}:
            assert getattr(now, field) == getattr(then, field), field
        assert set(now.unread) - {"processes"} == set(then.unread) - {"processes"}


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recording_of_a_real_gpu_reads_the_same_from_the_fake_driver(path: Path, tmp_path: Path) -> None:
    same(msgspec.json.decode(path.read_bytes(), type=Recording), tmp_path / "played")


def test_recorded_driver_can_be_replayed(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(3).set(1, "temperature", 66).set(1, "clock_sm", None).link(1, 4, "replay", 3)
    driver.set(2, "nvlinks", None).set(0, "clock_reasons", ("sw_power_cap",)).set(0, "recovery_action", "drain_p2p")
    done = recorded(driver.env())
    assert done.returncode == 0, done.stderr
    recording = msgspec.json.decode(done.stdout, type=Recording)
    assert recording.reading.gpus[1].temperature == 66
    assert recording.calls[1]["clock_sm by way 0"] == "not supported"
    assert recording.calls[0]["recovery_action by field 230"] == "3"
    assert recording.cpu_seconds > 0
    same(recording, tmp_path / "played")


def test_recording_without_a_driver_writes_nothing_and_states_the_reason_in_one_line(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path)
    driver.state.unlink()
    done = recorded(driver.env())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nothing to record: the NVIDIA driver is not loaded\n"
