"""The records that a node keeps between two checks of the site's hooks."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from rrl.core.types import NodeName
from rrl.health import check_memory
from rrl.health.check_memory import (
    FOLDER_ENV,
    CheckMemory,
    after_check,
    memory_path,
    read_memory,
    take_if_fresh,
    update_memory,
)

GPUS = ("0", "1")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "state"))
    return memory_path(NodeName("n1"))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [1000.0]
    monkeypatch.setattr(check_memory, "boot_time", lambda: at[0])
    return at


def checked(
    path: Path, at: float, *, passed: bool = True, full: bool = True, gpus: tuple[str, ...] = (), freed: bool = False
) -> None:
    update_memory(path, lambda memory: after_check(memory, passed=passed, full=full, gpus=gpus, freed=freed, at=at))


def test_node_that_passed_a_full_check_lately_need_not_be_checked(path: Path, now: list[float]) -> None:
    assert take_if_fresh(path, (), 600.0) is None
    checked(path, 900.0)
    assert take_if_fresh(path, (), 600.0) == 100.0
    now[0] = 1501.0
    assert take_if_fresh(path, (), 600.0) is None


def test_partial_check_is_not_a_full_one_and_a_failed_check_makes_the_next_one_necessary(
    path: Path, now: list[float]
) -> None:
    checked(path, 990.0, full=False)
    assert take_if_fresh(path, (), 600.0) is None
    checked(path, 900.0)
    checked(path, 990.0, full=False)
    assert take_if_fresh(path, (), 600.0) == 100.0
    checked(path, 995.0, full=False, passed=False)
    assert take_if_fresh(path, (), 600.0) is None


def test_job_with_gpus_needs_that_each_was_found_free_after_its_last_job(path: Path, now: list[float]) -> None:
    checked(path, 990.0, gpus=GPUS)  # a prolog, after which a job uses these GPUs
    assert take_if_fresh(path, GPUS, 600.0) is None
    checked(path, 995.0, gpus=GPUS, freed=True)  # its epilog
    assert take_if_fresh(path, ("0",), 600.0) is not None
    assert take_if_fresh(path, ("0",), 600.0) is None, "a second job may use the GPU without a new check"
    assert take_if_fresh(path, ("1",), 600.0) is not None


def test_gpus_for_which_the_hooks_have_drained_must_be_free_before_the_drain_is_taken_back(
    path: Path, now: list[float]
) -> None:
    checked(path, 990.0, gpus=("0",), freed=True, passed=False)  # an epilog
    assert read_memory(path).gpus_to_be_freed == (), (
        "a node without a drain waits for free GPUs, though the next job may get them"
    )
    update_memory(path, lambda memory: replace(memory, drained="by hook"))
    assert read_memory(path).gpus_to_be_freed == ("0",)
    checked(path, 991.0, gpus=("0",), passed=False)  # the HealthCheckProgram
    assert read_memory(path).gpus_to_be_freed == ("0",)
    checked(path, 992.0, gpus=("0",))
    assert read_memory(path).gpus_to_be_freed == ()


def test_gpus_that_an_epilog_found_in_use_stay_taken_after_another_epilog(path: Path, now: list[float]) -> None:
    checked(path, 990.0, gpus=GPUS, freed=True)
    checked(path, 995.0, gpus=("0",), freed=True, passed=False)
    checked(path, 996.0, gpus=("1",), freed=True)
    assert take_if_fresh(path, ("0",), 600.0) is None
    assert take_if_fresh(path, ("1",), 600.0) is not None


def test_nothing_is_remembered_from_before_a_boot(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    update_memory(path, lambda memory: CheckMemory(memory.boot_id, drained="no"))
    assert read_memory(path).drained == "no"
    monkeypatch.setattr(check_memory, "_BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("another boot\n")
    assert read_memory(path) == CheckMemory("another boot")


@pytest.mark.parametrize("text", ["", "{", '{"boot_id": 5}', "\x00"])
def test_damaged_memory_counts_as_none(path: Path, text: str, now: list[float]) -> None:
    checked(path, 990.0)
    path.write_text(text)
    assert read_memory(path).passed_at is None
    checked(path, 995.0)
    assert read_memory(path).passed_at == 995.0


def test_folder_that_others_may_write_is_refused(path: Path, now: list[float]) -> None:
    checked(path, 990.0)
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o022 == 0
    path.parent.chmod(0o777)
    assert read_memory(path).passed_at is None
    with pytest.raises(PermissionError, match="others may write to it"):
        checked(path, 995.0)
    if os.geteuid() == 0:
        path.parent.chmod(0o755)
        os.chown(path.parent, 65534, -1)
        assert read_memory(path).passed_at is None
