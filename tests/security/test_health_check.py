"""A plain user cannot make ``rrl health check`` fail a healthy node."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rrl.config.health_rules import ReaderRules, Rules
from rrl.core.types import Finding, Verdict
from rrl.health.node_check import check_node
from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.kernel_log import recognise
from rrl.tests.support.dcgm.exporter import labels, page
from rrl.tests.support.plain_user import PlainUser

UUID = "GPU-0a0a0a0a-0000-4000-8000-000000000000"
TIMEOUT_S = 60.0
EXPORTER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    connection.recv(4096)
    connection.sendall(("HTTP/1.0 200 OK\\r\\n\\r\\n" + sys.argv[1]).encode())
    connection.close()
"""
CRASHES = """
import ctypes, os, sys
comm = sys.argv[1].encode()
ctypes.CDLL(None).prctl(15, comm, 0, 0, 0)  # PR_SET_NAME
ctypes.CDLL(os.path.abspath(sys.argv[2])).crash()
"""
"""A program that sets its own name and crashes in a library of the attacker. The kernel prints both names."""
LIBRARY = "void crash(void) { *(volatile int *)0 = 1; }\n"
NAMES = ["NVRM: Xid (PCI:0000:cb:00): 79, x", "mce: [Hardware Error]: Uncorrected", "EXT4-fs error (device sda1): x"]
COMMS = ["x", "EDAC MC0: UE on", "ib0: Link down"]


@contextmanager
def exporter_of(user: PlainUser) -> Iterator[int]:
    """Start a fake dcgm-exporter as this user, whose page reports a broken GPU, and yield its port."""
    broken = page({0: UUID}, f"DCGM_FI_DEV_ROW_REMAP_FAILURE{labels(0, UUID)} 1")
    process = user.popen(sys.executable, "-c", EXPORTER, broken)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def dcgm_findings(port: int, folder: Path, rules: Rules) -> list[Finding]:
    """Check this node as root does, with a fake driver folder that lists the GPU."""
    driver = folder / "driver/nvidia/gpus/0000:1b:00.0"
    driver.mkdir(parents=True, exist_ok=True)
    (driver / "information").write_text(f"GPU UUID: \t {UUID}\n")
    if not (folder / "net").is_symlink():
        (folder / "net").symlink_to("/proc/net")
    options = ReaderOptions(exporter=f"http://127.0.0.1:{port}/metrics", dcgmi="/nowhere/dcgmi", proc=str(folder))
    return check_node(rules, TIMEOUT_S, only=["dcgm_memory"], options=options)


def test_exporter_of_another_user_is_rejected(owner: PlainUser, attacker: PlainUser, tmp_path: Path) -> None:
    theirs = Rules(readers=ReaderRules(dcgm_user=owner.name))
    with exporter_of(owner) as port:
        (found,) = dcgm_findings(port, tmp_path, theirs)
        assert (found.verdict, found.component) == (Verdict.FAIL, UUID), (
            "the failure that the site's own exporter reports was not found"
        )
    with exporter_of(attacker) as port:
        for rules in (Rules(), theirs):
            (found,) = dcgm_findings(port, tmp_path, rules)
            assert found.verdict is Verdict.UNKNOWN
            ignored = f"port {port} of 127.0.0.1 is ignored, because it belongs to uid {attacker.uid}"
            assert ignored in found.evidence[0].text


def test_foreign_exporter_cannot_report_a_gpu_that_does_not_exist(tmp_path: Path, owner: PlainUser) -> None:
    (tmp_path / "net").symlink_to("/proc/net")
    rules = Rules(readers=ReaderRules(dcgm_user=owner.name))
    with exporter_of(owner) as port:
        options = ReaderOptions(exporter=f"http://127.0.0.1:{port}/metrics", dcgmi="/nowhere/dcgmi", proc=str(tmp_path))
        found = check_node(rules, TIMEOUT_S, only=["dcgm_memory"], options=options)
    assert [one.verdict for one in found] == [Verdict.OK]


def test_a_dcgmi_of_another_user_is_not_run(attacker: PlainUser, tmp_path: Path) -> None:
    program = attacker.home / "bin/dcgmi"
    ran = attacker.home / "ran"

    def plant() -> None:
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\ntouch {ran}\n")
        program.chmod(0o755)

    attacker.call(plant, timeout_s=30)
    options = ReaderOptions(exporter="http://127.0.0.1:1/metrics", dcgmi=str(program))
    (found,) = check_node(Rules(), TIMEOUT_S, only=["dcgm_health"], options=options)
    assert found.verdict is Verdict.UNKNOWN
    assert "not run" in found.evidence[0].text
    assert not ran.exists()


def kernel_messages(after: int) -> list[str]:
    """Return the records of the kernel log after a sequence number; skip the test if the log is not readable."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        pytest.skip(f"/dev/kmsg: {error.strerror}")
    found = []
    try:
        while True:
            record = os.read(log, 8192).decode(errors="replace")
            if int(record.split(",")[1]) > after:
                found.append(record.split("\n")[0])
    except BlockingIOError:
        return found
    finally:
        os.close(log)


def test_crashes_of_programs_with_hostile_names_cause_no_finding_about_the_node(attacker: PlainUser) -> None:
    """Crashes of programs with hostile names cause no finding about the node.

    The test uses a program of a real user and the lines of the real kernel. It is skipped if the kernel prints no
    crashes (debug.exception-trace).
    """
    before = int((kernel_messages(-1) or ["0,-1"])[-1].split(",")[1])

    def crash() -> None:
        (attacker.home / "crash.c").write_text(LIBRARY)
        for name in NAMES:
            if os.system(f"cc -shared -fPIC -o '{name}' crash.c") != 0:  # noqa: S605
                return
            for comm in COMMS:
                if os.fork() == 0:
                    os.execv(sys.executable, [sys.executable, "-c", textwrap.dedent(CRASHES), comm, name])
                os.wait()

    attacker.call(crash, timeout_s=120)
    crashes = [line for line in kernel_messages(before) if "segfault" in line and any(name in line for name in NAMES)]
    if not crashes:
        pytest.skip("this kernel prints no crashes, or this machine has no compiler")
    assert all(line.startswith("6,") for line in crashes), (
        "a line is not of the kernel's own facility, but this test is only made for that facility"
    )
    for line in crashes:
        assert recognise(line.partition(";")[2].encode(), 0.0) is None, line
    found = check_node(Rules(), TIMEOUT_S, only=["xid", "kernel_mce", "kernel_filesystem", "kernel_nic"])
    reported = " ".join(evidence.text for one in found for evidence in one.evidence)
    assert not any(name in reported for name in NAMES)
    assert {one.verdict for one in found} <= {Verdict.OK, Verdict.UNKNOWN}
