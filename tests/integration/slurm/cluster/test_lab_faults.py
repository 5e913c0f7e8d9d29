"""A test cluster injects faults on request, and any other cluster refuses the request."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from rrl.cluster.base import Refused, Unanswered
from rrl.cluster.slurm.lab_faults import LAB_FAULTS_ENV, inject_fault
from rrl.core.faults import Fault, FaultKind
from rrl.tests.support.slurm import processes as slurm_processes
from rrl.tests.support.slurm.lab import SlurmLab

CRASH = Fault("f1", FaultKind.CRASH, "n2", seconds=1.0)


def test_cluster_fault_outside_of_a_test_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAB_FAULTS_ENV, raising=False)
    with pytest.raises(Refused, match="crash can be injected on a test cluster only"):
        asyncio.run(inject_fault(CRASH))


def test_unreachable_test_cluster_refuses_the_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LAB_FAULTS_ENV, str(tmp_path / "harm"))
    with pytest.raises(Refused, match=r"cannot be reached at .*harm: No such file"):
        asyncio.run(inject_fault(CRASH))
    with pytest.raises(Refused, match="a test cluster cannot inject kill, only crash, "):
        asyncio.run(inject_fault(Fault("f1", FaultKind.KILL, "rollout/0")))


@pytest.mark.parametrize(
    ("expected_text", "kind"),
    [(b"", Unanswered), (b"what?\n", Unanswered), (b'{"ok": false, "detail": "no"}\n', Refused)],
)
def test_each_answer_of_the_test_cluster_has_one_of_three_outcomes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expected_text: bytes, kind: type[Exception]
) -> None:
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readline())
        writer.write(expected_text)
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_unix_server(serve, tmp_path / "harm")
        async with server:
            with pytest.raises(kind):
                await inject_fault(Fault("f1", FaultKind.DELAY, "n2", seconds=5.0, amount=50.0))

    monkeypatch.setenv(LAB_FAULTS_ENV, str(tmp_path / "harm"))
    asyncio.run(scenario())
    assert requests == [b'{"do":"delay","seconds":5.0,"node":"n2","ms":50.0}\n']


@pytest.mark.slurm
def test_node_of_the_lab_crashes_and_comes_up_again(slurm_lab: SlurmLab) -> None:
    def inject_faults() -> None:
        assert os.environ[LAB_FAULTS_ENV]
        assert asyncio.run(inject_fault(CRASH)) == "crash n2 for 1 s"
        with pytest.raises(Refused, match="no node n77 in this lab"):
            asyncio.run(inject_fault(Fault("f2", FaultKind.CRASH, "n77")))

    before = slurm_processes.of_node(slurm_lab.dir, "n2")
    slurm_lab.call_as_user(inject_faults)
    deadline = time.monotonic() + 30
    while set(now := slurm_processes.of_node(slurm_lab.dir, "n2")) & set(before) or not now:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    slurm_lab.clear()
