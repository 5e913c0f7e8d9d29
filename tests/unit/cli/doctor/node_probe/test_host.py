"""The readers of a machine end within their deadlines, and report what they could not read."""

from __future__ import annotations

import os
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from rrl.cli.doctor.node_probe import host
from rrl.cli.doctor.node_probe.host import (
    Host,
    Interface,
    Ucx,
    Unavailable,
    UnavailableCause,
    filesystem,
    parse_ucx,
    read_host,
    run_readers,
)
from rrl.core.command_runner import CommandResult, run
from rrl.tests.support.nvml.driver import FakeDriver

UCX_INFO = """\
# Library version: 1.21.0
# Library path: /x/libucs.so.0
# Memory domain: mlx5_0
#     Component: ib
#      Transport: rc_mlx5
#         Device: mlx5_0:1
#           Type: network
#      Transport: dc_mlx5
#         Device: mlx5_0:1
# Memory domain: tcp
#      Transport: tcp
#         Device: eth0
#      Transport: tcp
#         Device: lo
# Memory domain: posix
#      Transport: posix
#         Device: memory
"""
TIMEOUT_S = 30.0


def test_reader_that_hangs_or_raises_is_unavailable_and_the_others_answer() -> None:
    never = threading.Event()

    def broken() -> object:
        raise ValueError("two\nlines")

    readers = {"well": lambda: 7, "broken": broken, "hangs": never.wait, "gone": Path("/nope").read_text}
    results = run_readers(readers, 0.5)
    never.set()
    assert results == {
        "well": 7,
        "broken": Unavailable("ValueError: two lines"),
        "hangs": Unavailable("no answer within 0.5 s", UnavailableCause.TIMEOUT),
        "gone": Unavailable("/nope: No such file or directory", UnavailableCause.NOT_FOUND),
    }


def test_ucx_transports_are_parsed_with_their_devices() -> None:
    assert parse_ucx(UCX_INFO, "x") == Ucx(
        "1.21.0", {"rc_mlx5": ("mlx5_0:1",), "dc_mlx5": ("mlx5_0:1",), "tcp": ("eth0", "lo"), "posix": ("memory",)}, "x"
    )
    assert parse_ucx("# UCT version=1.13.1 revision 0\n").version == "1.13.1"
    assert parse_ucx("nothing of the kind") == Ucx("", {}, "")


def test_failed_ucx_info_is_unavailable_with_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ucx_info"
    program.write_text("#!/bin/sh\necho cannot load libucp >&2; exit 127\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "true")
    assert run_readers({"ucx": lambda: host.read_ucx(TIMEOUT_S)}, TIMEOUT_S)["ucx"] == Unavailable(
        "ucx_info ended with 127: cannot load libucp"
    )


def test_host_of_this_machine_survives_serialization() -> None:
    mine = read_host(TIMEOUT_S)
    assert isinstance(mine.network, host.Network)
    assert Interface("lo", "127.0.0.1", "127.0.0.0/8") in mine.network.interfaces
    assert isinstance(mine.python, host.Python)
    assert (mine.python.executable, mine.python.packages["rrl-slurm"]) == (sys.executable, version("rrl-slurm"))
    assert isinstance(mine.machine, host.Machine)
    assert 0 < mine.machine.available <= mine.machine.memory
    assert isinstance(mine.limits, host.Limits)
    assert isinstance(mine.nvml, host.Nvml)
    assert isinstance(mine.scratch, host.Scratch)
    assert not mine.scratch.trouble
    assert msgspec.json.decode(msgspec.json.encode(mine), type=Host) == mine


def test_gpus_are_those_that_the_health_reader_finds_and_its_error_is_a_failure_of_nvml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(None, "name", "NVIDIA H100")
    for name, value in driver.env().items():
        monkeypatch.setenv(name, value)
    assert read_host(TIMEOUT_S).nvml == host.Nvml("570.86.15", ("NVIDIA H100", "NVIDIA H100"))
    driver.fail("nvmlInit", "LIB_RM_VERSION_MISMATCH")
    nvml = read_host(TIMEOUT_S).nvml
    assert isinstance(nvml, Unavailable)
    assert (nvml.cause, nvml.why.partition(":")[0]) == (UnavailableCause.NVML, "NVML does not start")


def test_unwritable_tmp_is_reported_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    scratch = read_host(TIMEOUT_S).scratch
    assert isinstance(scratch, host.Scratch)
    assert scratch.trouble == "No such file or directory"


def test_reading_a_host_imports_no_heavy_library() -> None:
    code = (
        "import sys; from rrl.cli.doctor.node_probe.host import read_host; read_host(30);"
        " print(*{'torch', 'ucxx', 'vllm', 'pynvml', 'transformers'} & set(sys.modules))"
    )
    assert run([sys.executable, "-P", "-c", code], 60.0) == CommandResult(0, "\n", "")


def test_file_system_is_found_by_its_mount() -> None:
    assert filesystem(Path("/proc/self")) == "proc"
    assert filesystem(Path("/dev/shm")) == "tmpfs"


def test_failed_import_of_torch_is_reported_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12 is not there')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = run_readers({"torch": lambda: host.read_torch(TIMEOUT_S)}, TIMEOUT_S)["torch"]
    assert results == Unavailable("ImportError: libcudart.so.12 is not there")
