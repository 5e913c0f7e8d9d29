"""States of healthy nodes, which must not fail a node."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rrl.config.health_rules import Expect, Rules
from rrl.core.types import Finding, Verdict
from rrl.health.checks.node_state import ALL_GPUS, CounterHistory
from rrl.health.readers.samples import (
    DcgmData,
    DcgmIncident,
    FabricData,
    GpuProcess,
    KernelEvent,
    Mount,
    NvidiaGpu,
    NvLink,
    NvmlData,
    StuckProcess,
)
from rrl.tests.support.health.simulated_node import LINKS, ObservedNode, gpu, host, port

HOUR = 3600.0
DOWN = tuple(NvLink(link=i, active=False) for i in range(4))
PCIE: dict[str, Any] = {"name": "NVIDIA H100 PCIe", "fabric_state": "not_supported", "fabric_status": None}


@pytest.fixture
def node() -> ObservedNode:
    return ObservedNode()


def ill(node: ObservedNode) -> list[Finding]:
    return [one for one in node.found if one.verdict in (Verdict.FAIL, Verdict.WARN)]


def old_driver(index: int = 0, **fields: Any) -> NvidiaGpu:
    """Return a GPU as a driver before r570 reports it, without a recovery action."""
    return gpu(index, **{"recovery_action": None, "unread": {"recovery_action": "not known to this driver"}, **fields})


# ── boards ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_bridged_and_unbridged_boards_in_one_node_have_no_findings() -> None:
    for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL"):
        card = {**PCIE, "name": name}
        node = ObservedNode().gpus(gpu(0, **card), gpu(1, **card), gpu(2, **card, nvlinks=DOWN), times=5)
        assert ill(node) == []


def test_gpu_of_a_switched_board_without_any_link_is_reported() -> None:
    assert ObservedNode().gpus(gpu(0, nvlinks=DOWN), times=5).verdict("nvlink_state") is Verdict.WARN
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "NVIDIA B300 SXM6 AC"):
        plain = {"name": name, "fabric_state": None}  # a driver that does not report the state of the fabric
        node = ObservedNode().gpus(gpu(0, **plain), gpu(1, **plain, nvlinks=DOWN), times=5)
        assert node.verdict("nvlink_state") is Verdict.WARN, name


def test_gpu_in_mig_mode_may_have_inactive_links_and_no_fabric() -> None:
    split = {"mig": True, "nvlinks": DOWN, "fabric_state": "not_started", "utilization": None}
    node = ObservedNode().gpus(times=2).gpus(gpu(0, **split), times=5)
    assert ill(node) == []


def test_dcgm_incident_on_an_unbridged_nvlink_warns_and_on_a_switched_board_fails() -> None:
    data = DcgmData(incidents=(DcgmIncident("GPU-0", "NVLink", "NVLINK_DOWN", "fail", "words"),))
    node = ObservedNode().gpus(gpu(0, **PCIE, nvlinks=DOWN), gpu(1, **PCIE, nvlinks=DOWN)).reads(data, times=5)
    assert node.verdict("dcgm_health") is Verdict.WARN
    assert ObservedNode().gpus().reads(data, times=5).verdict("dcgm_health") is Verdict.FAIL, (
        "an incident on a switched board must fail"
    )


# ── GPUs of other jobs ───────────────────────────────────────────────────────────────────────────────────────────────
def test_gpus_withheld_by_a_device_cgroup_are_not_counted_as_missing() -> None:
    node = ObservedNode(Rules(expect=Expect(gpus=8)))
    half = NvmlData(driver="570.1", gpus=tuple(gpu(i) for i in range(4)), granted=4, withheld=4)
    assert node.reads(half, times=5).verdict("gpu_count") is Verdict.OK
    lacking = msgspec.structs.replace(half, gpus=half.gpus[:3])
    assert ObservedNode(Rules(expect=Expect(gpus=8))).reads(lacking).verdict("gpu_count") is Verdict.FAIL
    assert ObservedNode(Rules(expect=Expect(gpus=4))).reads(lacking).verdict("gpu_count") is Verdict.FAIL


def test_gpu_indices_of_slurm_are_not_used_on_a_node_with_a_mig_gpu() -> None:
    busy = {"processes": (GpuProcess(7, 1001, None),), "memory_used": 2**34}
    node = ObservedNode()
    node.node_state.set_expected_free(["1"])
    node.gpus(gpu(0, mig=True), gpu(1, **busy, mig=True), times=15)
    assert ill(node) == []


def test_mps_server_process_does_not_count_as_a_foreign_process(node: ObservedNode) -> None:
    node.node_state.set_expected_free([ALL_GPUS])
    node.gpus(gpu(0, processes=(GpuProcess(7, 0, 30 * 2**20, "nvidia-cuda-mps"),)), times=15)
    assert node.verdict("gpu_processes") is Verdict.OK


def test_memory_of_a_slowly_ending_job_may_be_freed_within_ten_samples(node: ObservedNode) -> None:
    node.node_state.set_expected_free([ALL_GPUS])
    used = gpu(0, memory_used=2**34, processes=(GpuProcess(7, 1001, 2**34),))
    assert node.gpus(used, times=9).verdict("gpu_memory") is Verdict.WARN
    assert node.gpus(times=2).verdict("gpu_memory") is Verdict.OK


# ── idle clocks and links ────────────────────────────────────────────────────────────────────────────────────────────
def test_application_clocks_set_by_an_administrator_are_not_reported() -> None:
    node = ObservedNode().gpus(gpu(0, clock_sm=1100, clock_reasons=("applications_clocks",)), times=20)
    assert ill(node) == []


def test_slowed_gpu_gives_the_same_finding_for_every_reason() -> None:
    node = ObservedNode().gpus(gpu(0, clock_reasons=("sw_thermal",)), times=10)
    first = node.one("gpu_throttle")
    for reasons in (("hw_slowdown", "hw_thermal"), ("hw_thermal", "sw_thermal"), ("sw_thermal",)):
        assert node.gpus(gpu(0, clock_reasons=reasons)).one("gpu_throttle") == first


def test_pcie_link_of_an_idle_gpu_is_judged_by_its_maximum_generation() -> None:
    node = ObservedNode().gpus(gpu(0, pcie_replays=0, pcie_gen=1))
    node.gpus(gpu(0, pcie_replays=20, pcie_gen=1, utilization=0))
    assert node.verdict("pcie_replays") is Verdict.OK
    first = node.gpus(gpu(0, pcie_replays=60, pcie_gen=1)).one("pcie_replays")
    assert first.verdict is Verdict.WARN
    assert node.gpus(gpu(0, pcie_replays=60, pcie_gen=5)).one("pcie_replays") == first


def test_crc_errors_sampled_every_20_s_do_not_count_as_a_rate_per_second() -> None:
    node = ObservedNode().gpus(every=20)
    for look in range(1, 9):  # 60 a second
        link = msgspec.structs.replace(LINKS[0], crc_flit=1200 * look)
        node.gpus(gpu(0, nvlinks=(link, *LINKS[1:])), times=5).passes(15)
        assert node.verdict("nvlink_errors") is Verdict.WARN


def test_counter_increase_from_hours_ago_does_not_count_in_the_last_minute() -> None:
    trail = CounterHistory(0, 0)
    trail.add(10, 1000)
    trail.add(4 * HOUR, 1001)
    assert (trail.increase_within(60, 4 * HOUR), trail.increase) == (1, 1001)


# ── Xids ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("code", [48, 64, 79, 95, 140])
def test_xid_cured_by_a_reset_no_longer_counts_even_with_old_drivers(code: int) -> None:
    assert ObservedNode().gpus(old_driver()).xid(code, age=HOUR).verdict("xid") is Verdict.WARN


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (95, {"ecc_volatile_uncorrected": 2}),
        (64, {"remap_failed": True}),
        (79, {"lost": "GPU is lost"}),
        (119, {}),
        (95, {"ecc_volatile_uncorrected": None}),
    ],
)
def test_xid_whose_condition_persists_or_cannot_be_read_still_fails(code: int, fields: dict[str, Any]) -> None:
    assert ObservedNode().gpus(old_driver(**fields)).xid(code, age=HOUR).verdict("xid") is Verdict.FAIL


@pytest.mark.parametrize("code", [160, 162])
def test_xid_without_a_catalogue_action_follows_the_driver(code: int) -> None:
    assert ObservedNode().gpus().xid(code).verdict("xid") is Verdict.WARN
    assert ObservedNode().gpus(old_driver()).xid(code).verdict("xid") is Verdict.FAIL
    bad = ObservedNode().gpus(gpu(0, recovery_action="gpu_reset")).xid(code)
    assert bad.verdict("xid") is Verdict.FAIL


def test_xid_resolved_before_the_driver_hung_only_warns() -> None:
    node = ObservedNode().gpus().xid(119, age=HOUR).cannot("nvml").log()
    assert node.verdict("xid") is Verdict.WARN


# ── ports, logs ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_counters_of_an_unused_port_are_no_failure(node: ObservedNode) -> None:
    for downed in (1, 5):
        node.reads(FabricData(ports=(port(), port("mlx5_9", state="DOWN", counters={"link_downed": downed}))))
    assert ill(node) == []


def test_receiver_not_ready_errors_are_no_failure_of_the_fabric(node: ObservedNode) -> None:
    for naks in (1, 5000):
        node.reads(FabricData(ports=(port(counters={"rnr_nak_retry_err": naks}),)))
    assert node.verdict("fabric_errors") is Verdict.OK


def test_network_links_that_flap_during_boot_pass(node: ObservedNode) -> None:
    lost = [KernelEvent(kind="nic", text="ib0: Lost carrier", device="ib0", age=age) for age in (980.0, 970.0, 960.0)]
    assert node.log(*lost).verdict("kernel_nic") is Verdict.OK


@pytest.mark.parametrize("filesystem", ["squashfs", "iso9660", "erofs"])
def test_full_read_only_image_passes_the_disk_check(filesystem: str) -> None:
    mount = Mount(path="/", answers=True, filesystem=filesystem, used=1.0, inodes_used=1.0)
    assert ObservedNode().reads(host(mounts=(mount,)), times=5).verdict("disk") is Verdict.OK


@pytest.mark.parametrize(("uid", "verdict"), [(0, Verdict.WARN), (1002, Verdict.WARN), (1001, Verdict.FAIL)])
def test_foreign_process_in_state_d_does_not_count_as_a_survivor_of_our_kill(
    uid: int, verdict: Verdict, node: ObservedNode
) -> None:
    node.node_state.own_uid = 1001
    node.node_state.on_our_kill(node.now - 70)
    for seconds in (500, 501, 502):
        node.reads(host(stuck=(StuckProcess(pid=9, uid=uid, name="kworker", seconds=seconds),)))
    assert node.verdict("stuck") is verdict


def test_node_on_which_no_reader_answers_is_unknown_and_no_driver_failure(node: ObservedNode) -> None:
    for name in ("nvml", "dcgm", "kernel", "fabric", "host"):
        node.cannot(name)
    assert node.verdict("readers") is Verdict.UNKNOWN
