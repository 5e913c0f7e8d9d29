"""The check of a node reports failures that other tools do not report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rrl.core.types import Cause, Remedy, Verdict
from rrl.health.node_check import overall
from rrl.health.readers.samples import DcgmData, DcgmGpu, FabricData
from rrl.tests.support.health.fake_vendor import FAKE_ROW
from rrl.tests.support.health.simulated_node import ObservedNode, gpu, port


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"lost": "GPU requires reset", "recovery_action": None}, Remedy.RESET_GPU),
        ({"lost": "GPU is lost", "recovery_action": "drain_and_reset"}, Remedy.RESET_GPU),
        ({"lost": "GPU is lost", "recovery_action": None}, Remedy.REBOOT),
    ],
)
def test_lost_gpu_has_the_remedy_that_the_driver_reports(fields: dict[str, str | None], remedy: Remedy) -> None:
    found = ObservedNode().gpus(gpu(0, **fields)).one("gpu_lost")
    assert (found.verdict, found.remedy) == (Verdict.FAIL, remedy)


@pytest.mark.parametrize(("action", "remedy"), [("bus_reset", Remedy.RESET_GPU), ("system_reboot", Remedy.REBOOT)])
def test_newest_recovery_actions_give_their_remedies(action: str, remedy: Remedy) -> None:
    found = ObservedNode().gpus(gpu(0, recovery_action=action), times=3).one("gpu_recovery_action")
    assert (found.verdict, found.remedy) == (Verdict.FAIL, remedy)


@pytest.mark.parametrize("action", ["recover_imex_domain", "unknown (9)"])
def test_recovery_action_for_several_nodes_or_of_a_newer_driver_only_warns(action: str) -> None:
    found = ObservedNode().gpus(gpu(0, recovery_action=action), times=9).one("gpu_recovery_action")
    assert (found.verdict, found.remedy) == (Verdict.WARN, Remedy.SUPPORT)


def test_simultaneous_loss_of_all_infiniband_devices_fails() -> None:
    node = ObservedNode().reads(FabricData(ports=(port(), port("mlx5_1"))))
    for _ in range(3):
        node.cannot("fabric", "absent", "there is no InfiniBand or RoCE device")
    assert {one.component for one in node.of("hca_count") if one.verdict is Verdict.FAIL} == {"mlx5_0", "mlx5_1"}


def test_driver_that_disappears_makes_the_node_unknown() -> None:
    node = ObservedNode().gpus().cannot("nvml", "absent", "the NVIDIA driver is not loaded")
    assert overall(node.found) is Verdict.UNKNOWN


def test_port_that_went_down_still_fails_while_its_state_cannot_be_read() -> None:
    node = ObservedNode().reads(FabricData(ports=(port(),)))
    node.reads(FabricData(ports=(port(state="DOWN"),)), times=3)
    node.reads(FabricData(ports=(port(state=None, unread={"state": "not permitted"}),)), times=4)
    assert node.verdict("fabric_port") is Verdict.FAIL


def test_code_that_dcgm_counts_for_the_first_time_is_a_new_event() -> None:
    """A code has no metric before its first Xid, because the exporter counts only the Xids of the last minutes."""
    node = ObservedNode().gpus().reads(DcgmData(gpus=(DcgmGpu(uuid="GPU-0"),)))
    assert node.reads(DcgmData(gpus=(DcgmGpu(uuid="GPU-0", xid_counts={79: 1}),))).verdict("xid") is Verdict.FAIL


def test_counts_of_an_exporter_restart_after_it_was_unreachable() -> None:
    away = DcgmData(unread={"exporter": "connection refused"})
    node = ObservedNode().gpus().reads(away).reads(DcgmData(gpus=(DcgmGpu(uuid="GPU-0", xid_counts={79: 1}),)))
    assert node.verdict("xid") is Verdict.OK


def test_xid_that_recurs_after_the_driver_cleared_it_fails_again() -> None:
    node = ObservedNode().gpus().xid(119)
    node.xid(154, text="GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    node.log().log()
    assert node.verdict("xid") is Verdict.OK
    assert node.passes(30).xid(119).verdict("xid") is Verdict.FAIL


# ── reports around a kill of rrl ─────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("code", [13, 31, 74, 61])
def test_an_xid_that_preceded_our_kill_counts(code: int) -> None:
    node = ObservedNode().gpus().xid(code)
    node.node_state.on_our_kill(node.now + 20)
    assert node.passes(20).gpus(times=3).verdict("xid") is Verdict.WARN


def test_xid_of_a_crash_counts_although_its_processes_were_killed_at_once() -> None:
    node = ObservedNode().gpus()
    node.node_state.on_our_kill(node.now)  # processes that a crashed role has left behind
    node.gpus().xid(31)
    assert node.verdict("xid") is Verdict.OK
    node.node_state.on_role_death(["GPU-0"], node.now)
    found = node.check_again().one("xid")
    assert (found.verdict, found.cause) == (Verdict.WARN, Cause.USER)


def test_reader_of_another_vendor_is_one_row_beside_nvml() -> None:
    """The row is added before the checks are imported, as if it stood in the table."""
    program = (
        "import json; from rrl.health.readers import base; base.READERS += ('fake',)\n"
        f"base.ACCELERATOR_READERS['fake'] = base.READER_CLASSES['fake'] = {FAKE_ROW!r}\n"
        "from rrl.config.health_rules import Expect, Rules; from rrl.health.node_check import check_node\n"
        "found = check_node(Rules(expect=Expect(gpus=2)), 30.0)\n"
        "print(json.dumps([(f.detector, f.component, f.verdict, f.evidence[0].source) for f in found]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    found = {tuple(one) for one in json.loads(done.stdout)}
    assert ("gpu_lost", "FAKE-1", "FAIL", "fake") in found
    assert ("gpu_temperature", "FAKE-0", "WARN", "fake") in found
    assert ("gpu_count", "", "OK", "fake") in found
    assert ("readers", "OK") in {(detector, verdict) for detector, _, verdict, _ in found}, "NVML's reader is missed"
    assert ("nvlink_state", "", "UNKNOWN", "nvml") in found
