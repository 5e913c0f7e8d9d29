"""Further checks of a node: DCGM's verdicts, kernel log, InfiniBand, mounts and host."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rrl.config.health_rules import Expect, Rules
from rrl.core.types import Cause, Flag, Remedy, Verdict
from rrl.health.readers.samples import (
    DcgmData,
    DcgmGpu,
    DcgmIncident,
    FabricData,
    HostData,
    KernelEvent,
    Mount,
    StuckProcess,
)
from rrl.tests.support.health.simulated_node import ObservedNode, host, port

HOUR = 3600.0


# ── DCGM ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def dcgm(code: str, severity: Any = "fail", source: Any = "health", system: str = "Memory") -> DcgmData:
    incident = DcgmIncident(gpu="GPU-0", system=system, code=code, severity=severity, text="words", source=source)
    return DcgmData(incidents=(incident,))


@pytest.mark.parametrize(
    ("code", "verdict", "remedy"),
    [
        ("VOLATILE_DBE_DETECTED", Verdict.FAIL, Remedy.RESET_GPU),
        ("NVLINK_DOWN", Verdict.FAIL, Remedy.REBOOT),
        ("UNCONTAINED_ERROR", Verdict.FAIL, Remedy.REBOOT),
        ("FIELD_VIOLATION", Verdict.FAIL, Remedy.REBOOT),
        ("ROW_REMAP_FAILURE", Verdict.FAIL, Remedy.SUPPORT),
        ("NVLINK_CRC_ERROR_THRESHOLD", Verdict.FAIL, Remedy.SUPPORT),
        ("PENDING_ROW_REMAP", Verdict.WARN, Remedy.RESET_GPU),
        ("CLOCKS_EVENT_THERMAL", Verdict.WARN, Remedy.SUPPORT),
        ("FABRIC_MANAGER_TRAINING_ERROR", Verdict.WARN, Remedy.SUPPORT),
        ("SOMETHING_NEW", Verdict.WARN, Remedy.SUPPORT),
        ("CLOCK_THROTTLE_POWER", Verdict.OK, Remedy.NONE),
        ("VOLATILE_SBE_DETECTED", Verdict.OK, Remedy.NONE),
        ("NVLINK_ERROR_THRESHOLD", Verdict.OK, Remedy.NONE),
        ("NVSWITCH_NON_FATAL_ERROR", Verdict.OK, Remedy.NONE),
    ],
)
def test_dcgms_incidents_are_judged_by_their_code(code: str, verdict: Verdict, remedy: Remedy) -> None:
    node = ObservedNode().reads(dcgm(code), times=3)
    assert (node.verdict("dcgm_health"), node.one("dcgm_health").remedy) == (verdict, remedy)


def test_one_dcgm_incident_is_not_proof_and_a_dcgm_warning_never_fails() -> None:
    assert ObservedNode().reads(dcgm("NVLINK_DOWN"), times=2).verdict("dcgm_health") is Verdict.WARN
    assert ObservedNode().reads(dcgm("NVLINK_DOWN", "warn"), times=9).verdict("dcgm_health") is Verdict.WARN


def test_one_run_of_dcgmi_health_counts_once_in_several_samples() -> None:
    def health_run(run: float) -> DcgmData:
        return msgspec.structs.replace(dcgm("POWER_UNREADABLE", system="Power"), health_at=run)

    node = ObservedNode().reads(health_run(60), times=4, every=15).reads(health_run(120), times=4, every=15)
    assert node.verdict("dcgm_health") is Verdict.WARN
    assert node.reads(health_run(180)).verdict("dcgm_health") is Verdict.FAIL
    well = msgspec.structs.replace(DcgmData(), health_at=240)
    assert node.reads(well, times=4, every=15).verdict("dcgm_health") is Verdict.FAIL, (
        "a single good run of dcgmi has cleared the finding"
    )
    assert node.reads(msgspec.structs.replace(well, health_at=300)).verdict("dcgm_health") is Verdict.OK
    assert node.cannot("dcgm").verdict("dcgm_health") is Verdict.UNKNOWN


def test_failed_diag_test_fails_unless_gcm_skips_it() -> None:
    node = ObservedNode().reads(dcgm("", source="diag", system="Memory"))
    assert (node.verdict("dcgm_diag"), node.one("dcgm_diag").remedy) == (Verdict.FAIL, Remedy.EXCLUDE)
    for skipped in ("Denylist", "Blacklist", "Inforom"):
        assert ObservedNode().reads(dcgm("", source="diag", system=skipped)).verdict("dcgm_diag") is Verdict.OK


def test_dcgms_exporter_is_a_second_witness_of_bad_memory() -> None:
    cases: tuple[dict[str, Any], ...] = ({"ecc_volatile_uncorrected": 2}, {"remap_failed": True})
    for fields in cases:
        data = DcgmData(gpus=(DcgmGpu(uuid="GPU-1", **fields),), driver_gpus=("GPU-1",))
        found = ObservedNode().reads(data).one("dcgm_memory")
        assert (found.verdict, found.component, found.proof) == (Verdict.FAIL, "GPU-1", True)
    assert ObservedNode().reads(DcgmData(gpus=(DcgmGpu(uuid="GPU-1"),))).verdict("dcgm_memory") is Verdict.OK


def test_dcgmi_that_is_not_installed_is_unknown() -> None:
    node = ObservedNode().reads(DcgmData(unread={"health": "dcgmi is not installed", "diag": "not asked for"}))
    assert (node.verdict("dcgm_health"), node.verdict("dcgm_diag")) == (Verdict.UNKNOWN, Verdict.UNKNOWN)
    assert "dcgmi is not installed" in node.text("dcgm_health")


# ── kernel log ───────────────────────────────────────────────────────────────────────────────────────────────────────
def line(kind: Any, text: str, device: str = "", age: float = 0.0) -> KernelEvent:
    return KernelEvent(kind=kind, text=text, device=device, age=age)


@pytest.mark.parametrize(
    ("event", "check", "verdict", "cause"),
    [
        (line("io", "nvme0n1: I/O error, dev nvme0n1, sector 8", "nvme0n1"), "kernel_io", Verdict.FAIL, Cause.STORAGE),
        (line("io", "sr0: I/O error", "sr0"), "kernel_io", Verdict.OK, None),
        (
            line("filesystem", "EXT4-fs (sda1): Remounting filesystem read-only", "sda1"),
            "kernel_filesystem",
            Verdict.FAIL,
            Cause.STORAGE,
        ),
        (
            line("filesystem", "nfs: server fs1 not responding, still trying"),
            "kernel_filesystem",
            Verdict.WARN,
            Cause.STORAGE,
        ),
        (line("mce", "mce: [Hardware Error]: Uncorrected error"), "kernel_mce", Verdict.FAIL, Cause.NODE),
        (line("mce", "mce: [Hardware Error]: Corrected error"), "kernel_mce", Verdict.WARN, Cause.NODE),
        (
            line("mce", "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0)"),
            "kernel_mce",
            Verdict.FAIL,
            Cause.NODE,
        ),
        (
            line("mce", "EDAC MC0: 3 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0)"),
            "kernel_mce",
            Verdict.WARN,
            Cause.NODE,
        ),
        (line("mce", "{1}[Hardware Error]: event severity: recoverable"), "kernel_mce", Verdict.FAIL, Cause.NODE),
        (line("mce", "{1}[Hardware Error]: event severity: corrected"), "kernel_mce", Verdict.WARN, Cause.NODE),
        (line("mce", "{1}[Hardware Error]:   error_type: 3, multi-bit ECC"), "kernel_mce", Verdict.FAIL, Cause.NODE),
        (line("mce", "{1}[Hardware Error]:   error_type: 2, single-bit ECC"), "kernel_mce", Verdict.WARN, Cause.NODE),
        (
            line("mce", "{1}[Hardware Error]: section_type: memory error; non-fatal"),
            "kernel_mce",
            Verdict.WARN,
            Cause.NODE,
        ),
        (
            line("mce", "mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 7: be00000000800400"),
            "kernel_mce",
            Verdict.FAIL,
            Cause.NODE,
        ),
        (
            line("mce", "mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 5: 9c00000000010092"),
            "kernel_mce",
            Verdict.WARN,
            Cause.NODE,
        ),
        (
            line("mce", "[Hardware Error]: CPU:0 (19:1:1) MC18_STATUS[-|UE|MiscV|AddrV|-|-|SyndV|UECC]: 0xbc002000000"),
            "kernel_mce",
            Verdict.FAIL,
            Cause.NODE,
        ),
        (
            line("mce", "mce: Uncorrected hardware memory error in user-access at 6f5a2b4400"),
            "kernel_mce",
            Verdict.FAIL,
            Cause.NODE,
        ),
        (
            line("mce", "Memory failure: 0x3f8c2b: recovery action for dirty LRU page: Recovered"),
            "kernel_mce",
            Verdict.FAIL,
            Cause.NODE,
        ),
        (
            line("io", "critical target error, dev sda, sector 2048 op 0x3:(DISCARD) flags 0x800", "sda"),
            "kernel_io",
            Verdict.OK,
            None,
        ),
        (
            line("io", "critical target error, dev sda, sector 2048 op 0x9:(WRITE_ZEROES) flags 0x800", "sda"),
            "kernel_io",
            Verdict.OK,
            None,
        ),
        (
            line("io", "critical target error, dev sda, sector 2048 op 0x1:(WRITE) flags 0x800", "sda"),
            "kernel_io",
            Verdict.FAIL,
            Cause.STORAGE,
        ),
        (
            line("io", "nvme nvme0: I/O 12 QID 4 timeout, completion polled", "nvme0"),
            "kernel_io",
            Verdict.WARN,
            Cause.STORAGE,
        ),
        (line("io", "nvme nvme0: I/O 12 QID 4 timeout, aborting", "nvme0"), "kernel_io", Verdict.FAIL, Cause.STORAGE),
        (
            line("hung_task", "INFO: task kworker/u256:3:991 blocked for more than 120 seconds."),
            "kernel_hung",
            Verdict.WARN,
            Cause.NODE,
        ),
        (
            line("hung_task", "INFO: task xfsaild/sda2:991 blocked for more than 120 seconds."),
            "kernel_hung",
            Verdict.WARN,
            Cause.STORAGE,
        ),
        (line("nic", "ib0: Lost carrier", "ib0"), "kernel_nic", Verdict.WARN, Cause.FABRIC),
        (line("oom", "Out of memory: Killed process 7 (python)"), "oom", Verdict.WARN, Cause.USER),
    ],
)
def test_kernel_log_event_gives_its_verdict_and_cause(
    event: KernelEvent, check: str, verdict: Verdict, cause: Cause | None
) -> None:
    node = ObservedNode().log(event)
    assert node.verdict(check) is verdict
    assert cause is None or node.one(check).cause is cause


NFS = line("filesystem", "nfs: server fs1 not responding, still trying", "fs1")
STALLS = (Flag.STORAGE_STALLS,)


def test_silent_file_server_stalls_storage_until_it_answers_or_half_an_hour_passes() -> None:
    node = ObservedNode().log(NFS)
    assert node.one("kernel_filesystem").flags == STALLS
    node.passes(60).log(line("filesystem_back", "nfs: server fs2 OK", "fs2"))
    assert node.one("kernel_filesystem").flags == STALLS, "the answer of another server has ended the stall"
    node.passes(60).log(line("filesystem_back", "nfs: server fs1 OK", "fs1"))
    assert (node.one("kernel_filesystem").flags, node.verdict("kernel_filesystem")) == ((), Verdict.WARN)
    node.passes(60).log(NFS)
    assert node.one("kernel_filesystem").flags == STALLS
    node.passes(Rules().kernel.stall_window).log()
    assert (node.one("kernel_filesystem").flags, node.verdict("kernel_filesystem")) == ((), Verdict.WARN)


def test_local_file_system_that_gave_up_does_not_stall() -> None:
    node = ObservedNode().log(line("filesystem", "EXT4-fs error (device sda1): ext4_lookup:1602: inode #2", "sda1"))
    assert node.one("kernel_filesystem").flags == ()


@pytest.mark.parametrize(("task", "flags"), [("nfsd", STALLS), ("kworker/u256:3", ())])
def test_hung_task_stalls_storage_if_it_waits_for_storage(task: str, flags: tuple[Flag, ...]) -> None:
    node = ObservedNode().log(line("hung_task", f"INFO: task {task}:991 blocked for more than 120 seconds."))
    assert node.one("kernel_hung").flags == flags


@pytest.mark.parametrize(
    ("kernel_function", "flags"),
    [("folio_wait_bit_common", STALLS), ("nfs_wait_bit_killable", STALLS), ("nvidia_unlocked_ioctl", ()), ("", ())],
)
def test_process_in_state_d_stalls_storage_if_it_waits_there(kernel_function: str, flags: tuple[Flag, ...]) -> None:
    stuck = StuckProcess(pid=9, uid=1001, name="python", seconds=400.0, kernel_function=kernel_function)
    assert ObservedNode().reads(host(stuck=(stuck,))).one("stuck").flags == flags


def test_mount_that_does_not_answer_stalls_storage_at_once() -> None:
    dead = host(mounts=(Mount(path="/scratch", answers=False, why="did not answer within 10 s", filesystem="nfs4"),))
    assert ObservedNode().reads(dead).one("mounts").flags == STALLS


def test_firmware_report_from_before_the_boot_does_not_fail_the_node() -> None:
    event = line("mce", "[Hardware Error]: event severity: fatal", age=980)  # 20 s after the boot
    assert ObservedNode().log(event).verdict("kernel_mce") is Verdict.WARN


def test_hung_task_gives_an_equal_finding_for_an_hour() -> None:
    node = ObservedNode().log(line("hung_task", "INFO: task python:7 blocked for more than 120 seconds."))
    first = node.one("kernel_hung")
    node.passes(120).log(line("hung_task", "INFO: task python:7 blocked for more than 241 seconds."))
    assert node.one("kernel_hung") == first
    assert node.passes(2 * HOUR).log().log().verdict("kernel_hung") is Verdict.OK


def test_kernel_log_event_counts_for_a_day() -> None:
    node = ObservedNode().log(line("io", "nvme0n1: I/O error", "nvme0n1", age=23 * HOUR))
    assert node.verdict("kernel_io") is Verdict.FAIL
    assert node.passes(2 * HOUR).log().log().verdict("kernel_io") is Verdict.OK


def test_third_flap_within_an_hour_fails_on_infiniband_and_never_on_ethernet() -> None:
    for device, verdict in (("ib0", Verdict.FAIL), ("eth0", Verdict.WARN)):
        node = ObservedNode()
        for _ in range(3):
            node.log(line("nic", f"{device}: Lost carrier", device)).passes(600)
        assert node.verdict("kernel_nic") is verdict


def test_oom_kill_has_cause_user_and_earlier_ones_do_not_count() -> None:
    assert ObservedNode().log(line("oom", "Out of memory", age=HOUR)).verdict("oom") is Verdict.OK
    node = ObservedNode().reads(host(oom_kills=3)).reads(host(oom_kills=4))
    assert (node.verdict("oom"), node.one("oom").cause) == (Verdict.WARN, Cause.USER)


def test_a_log_that_may_not_be_read_is_unknown() -> None:
    node = ObservedNode().cannot("kernel", "denied", "kernel.dmesg_restrict is 1")
    assert {node.verdict(check) for check in ("kernel_io", "kernel_mce", "kernel_nic")} == {Verdict.UNKNOWN}


# ── InfiniBand and RoCE ──────────────────────────────────────────────────────────────────────────────────────────────
def ports(*listed: Any, missing: tuple[str, ...] = ()) -> FabricData:
    return FabricData(ports=listed, missing_char_devices=missing)


def test_port_that_was_active_fails_after_three_samples_and_unused_port_passes() -> None:
    unused = port("mlx5_9", state="DOWN", physical="Disabled")
    node = ObservedNode().reads(ports(port(), unused), times=5, every=5)
    assert node.verdict("fabric_port") is Verdict.OK
    node.reads(ports(port(state="DOWN", physical="Polling"), unused), times=2, every=5)
    assert node.verdict("fabric_port") is Verdict.WARN
    found = node.reads(ports(port(state="DOWN", physical="Polling"), unused), every=5).one("fabric_port")
    assert (found.verdict, found.cause, found.component) == (Verdict.FAIL, Cause.FABRIC, "mlx5_0/1")


def test_link_that_returns_within_a_second_does_not_fail() -> None:
    node = ObservedNode().reads(ports(port())).reads(ports(port(state="INIT"))).reads(ports(port()), times=2)
    assert node.verdict("fabric_port") is Verdict.OK


def test_an_expected_port_must_be_up_from_the_beginning() -> None:
    rules = Rules(expect=Expect(ports=("mlx5_0/1", "mlx5_7/1")))
    node = ObservedNode(rules).reads(ports(port(state="DOWN")), times=3)
    assert {one.component for one in node.of("fabric_port") if one.verdict is Verdict.FAIL} == {"mlx5_0/1", "mlx5_7/1"}


def test_infiniband_device_count_below_the_expected_or_earlier_one_fails() -> None:
    rules = Rules(expect=Expect(hcas=2))
    assert ObservedNode(rules).reads(ports(port()), times=3).verdict("hca_count") is Verdict.FAIL
    assert ObservedNode(rules).reads(ports(port(), port("mlx5_1")), times=3).verdict("hca_count") is Verdict.OK
    node = ObservedNode().reads(ports(port(), port("mlx5_1"))).reads(ports(port()), times=2)
    assert node.verdict("hca_count") is Verdict.WARN
    assert node.reads(ports(port())).verdict("hca_count") is Verdict.FAIL


def test_missing_verbs_devices_fail_after_three_samples() -> None:
    node = ObservedNode().reads(ports(port(), missing=("uverbs0",)), times=3)
    assert node.verdict("fabric_devices") is Verdict.FAIL
    assert ObservedNode().reads(ports(port(), missing=("issm0",)), times=5).verdict("fabric_devices") is Verdict.OK


def test_port_slower_than_before_warns_and_port_that_was_always_slow_passes() -> None:
    steady = port("mlx5_1", rate=200.0)
    node = ObservedNode().reads(ports(port(rate=400.0), steady), times=3, every=5)
    assert node.reads(ports(port(rate=100.0), steady), every=5).verdict("fabric_port") is Verdict.OK, (
        "a port that may still retrain its link was reported"
    )
    found = node.reads(ports(port(rate=100.0), steady), times=2, every=5).one("fabric_port")
    assert (found.verdict, found.component, found.cause) == (Verdict.WARN, "mlx5_0/1", Cause.FABRIC)
    assert node.reads(ports(port(rate=400.0), steady), times=2, every=5).verdict("fabric_port") is Verdict.OK


def test_link_down_once_within_an_hour_warns_and_twice_fails() -> None:
    def downed(total: int) -> FabricData:
        return ports(port(counters={"link_downed": total}))

    node = ObservedNode().reads(downed(40), times=5).reads(downed(41), times=5)
    assert (node.verdict("fabric_errors"), node.one("fabric_errors").remedy) == (Verdict.WARN, Remedy.NONE)
    node.passes(HOUR).reads(downed(41), times=2)
    assert node.verdict("fabric_errors") is Verdict.OK
    assert node.reads(downed(42)).verdict("fabric_errors") is Verdict.WARN
    node.passes(1800).reads(downed(43))
    assert (node.verdict("fabric_errors"), node.one("fabric_errors").remedy) == (Verdict.FAIL, Remedy.EXCLUDE)


@pytest.mark.parametrize("counter", ["local_link_integrity_errors", "excessive_buffer_overrun_errors"])
def test_increase_of_a_fatal_counter_fails_and_its_initial_total_does_not(counter: str) -> None:
    node = ObservedNode().reads(ports(port(counters={counter: 40})), times=5)
    assert node.verdict("fabric_errors") is Verdict.OK
    node.reads(ports(port(counters={counter: 41})))
    assert (node.verdict("fabric_errors"), node.one("fabric_errors").remedy) == (Verdict.FAIL, Remedy.EXCLUDE)


def test_symbol_errors_above_120_an_hour_fail_and_ten_a_second_warn() -> None:
    few = (
        ObservedNode()
        .reads(ports(port(counters={"symbol_error": 0})))
        .reads(ports(port(counters={"symbol_error": 119})))
    )
    assert (few.verdict("fabric_errors"), few.verdict("fabric_degraded")) == (Verdict.OK, Verdict.OK)
    many = ObservedNode().reads(ports(port(counters={"symbol_error": 0})), every=5)
    for look in range(1, 9):
        many.reads(ports(port(counters={"symbol_error": 60 * look})), every=5)
    assert (many.verdict("fabric_errors"), many.verdict("fabric_degraded")) == (Verdict.FAIL, Verdict.WARN)


@pytest.mark.parametrize(
    ("counter", "rise"),
    [
        ("port_rcv_errors", 400),
        ("local_ack_timeout_err", 40),
        ("port_xmit_discards", 4000),
        ("roce_slow_restart", 400),
        ("link_error_recovery", 6),
        ("carrier_changes", 3),
    ],
)
def test_rates_above_their_limits_warn(counter: str, rise: int) -> None:
    node = ObservedNode().reads(ports(port(counters={counter: 10}))).reads(ports(port(counters={counter: 10 + rise})))
    assert (node.verdict("fabric_degraded"), node.one("fabric_degraded").remedy) == (Verdict.WARN, Remedy.SUPPORT)
    assert counter in node.text("fabric_degraded") or "carrier" in node.text("fabric_degraded")
    half = (
        ObservedNode().reads(ports(port(counters={counter: 10}))).reads(ports(port(counters={counter: 10 + rise // 2})))
    )
    assert half.verdict("fabric_degraded") is Verdict.OK


# ── host ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_mount_that_does_not_answer_fails_after_three_samples() -> None:
    dead = host(mounts=(Mount(path="/scratch", answers=False, why="did not answer within 10 s", filesystem="nfs4"),))
    node = ObservedNode().reads(dead, times=2, every=10)
    assert node.verdict("mounts") is Verdict.WARN
    found = node.reads(dead, every=10).one("mounts")
    assert (found.verdict, found.cause, found.component) == (Verdict.FAIL, Cause.STORAGE, "/scratch")
    assert node.reads(host(), times=2).verdict("mounts") is Verdict.OK


@pytest.mark.parametrize(("device", "verdict"), [("sda1", Verdict.FAIL), ("loop0", Verdict.OK)])
def test_file_system_error_of_a_users_loop_device_does_not_fail_the_node(device: str, verdict: Verdict) -> None:
    error = KernelEvent(kind="filesystem", text=f"EXT4-fs error (device {device}): ext4_lookup:1602", device=device)
    assert ObservedNode().log(error).verdict("kernel_filesystem") is verdict


def scratch(attempts: int, hung_for: float, *, others: bool = True) -> HostData:
    """Return a reading in which /scratch has not answered ``attempts`` processes for ``hung_for`` seconds.

    ``others`` says whether the other mount answers.
    """
    hung = Mount(path="/scratch", answers=False, why="did not answer within 15 s", attempts=attempts, hung_for=hung_for)
    return host(mounts=(hung, Mount(path="/", answers=others, why="" if others else "did not answer within 15 s")))


@pytest.mark.parametrize(
    ("reading", "verdict"),
    [
        (scratch(3, 15.1), Verdict.FAIL),
        (scratch(2, 15.1), Verdict.WARN),  # single requests may get lost
        (scratch(3, 10.0), Verdict.WARN),  # a server answers again soon after a failover
        (scratch(3, 15.1, others=False), Verdict.WARN),  # the whole node stood still
        (scratch(0, 0.0), Verdict.WARN),
    ],
)
def test_single_sample_of_a_hung_mount_fails_after_enough_time_and_attempts(
    reading: HostData, verdict: Verdict
) -> None:
    found = next(one for one in ObservedNode().reads(reading).of("mounts") if one.component == "/scratch")
    assert found.verdict is verdict


@pytest.mark.parametrize(
    ("filesystem", "used", "inodes", "verdict"),
    [
        ("ext4", 0.79, 0.1, Verdict.OK),
        ("ext4", 0.81, 0.1, Verdict.WARN),
        ("xfs", 0.1, 0.85, Verdict.WARN),
        ("ext4", 0.97, 0.1, Verdict.FAIL),
        ("xfs", 0.1, 0.99, Verdict.FAIL),
        ("lustre", 0.99, 0.1, Verdict.WARN),
        ("nfs4", 0.99, None, Verdict.WARN),
        ("", None, None, Verdict.OK),
    ],
)
def test_disk_usage_is_judged_by_file_system_and_share(
    filesystem: str, used: float | None, inodes: float | None, verdict: Verdict
) -> None:
    mount = Mount(path="/x", answers=True, filesystem=filesystem, used=used, inodes_used=inodes)
    assert ObservedNode().reads(host(mounts=(mount,)), times=3).verdict("disk") is verdict


def test_memory_below_the_available_or_expected_amount_warns() -> None:
    assert ObservedNode().reads(host(memory_available=10 * 2**30)).verdict("memory") is Verdict.WARN
    rules = Rules(expect=Expect(memory=1024 * 2**30))
    assert ObservedNode(rules).reads(host()).verdict("memory") is Verdict.WARN
    assert ObservedNode(Rules(expect=Expect(memory=500 * 2**30))).reads(host()).verdict("memory") is Verdict.OK


def test_unexpected_cpu_governor_or_clock_source_warns() -> None:
    rules = Rules(expect=Expect(governor="performance", clock_source="tsc"))
    assert ObservedNode(rules).reads(host()).verdict("cpu_governor") is Verdict.OK
    assert ObservedNode(rules).reads(host(governor="powersave")).verdict("cpu_governor") is Verdict.WARN
    assert ObservedNode().reads(host(governor="powersave")).verdict("cpu_governor") is Verdict.OK
    assert ObservedNode(rules).reads(host(clock_source="kvm-clock")).verdict("clock_source") is Verdict.WARN
    assert ObservedNode().reads(host(clock_source="hpet")).verdict("clock_source") is Verdict.WARN
    assert ObservedNode().reads(host(clock_source="kvm-clock")).verdict("clock_source") is Verdict.OK


def test_process_in_state_d_warns_after_five_minutes_and_fails_after_our_kill() -> None:
    def stuck(seconds: float) -> Any:
        return host(stuck=(StuckProcess(pid=9, uid=1001, name="python", seconds=seconds, kernel_function="rpc_wait"),))

    assert ObservedNode().reads(stuck(200)).verdict("stuck") is Verdict.OK
    assert ObservedNode().reads(stuck(301)).verdict("stuck") is Verdict.WARN
    node = ObservedNode()
    node.node_state.on_our_kill(node.now)
    node.passes(50).reads(stuck(55), times=3)
    assert node.verdict("stuck") is Verdict.OK
    node.passes(20)
    for more in (73, 74, 75):
        node.reads(stuck(more))
    assert (node.verdict("stuck"), node.one("stuck").remedy) == (Verdict.FAIL, Remedy.REBOOT)


def test_more_than_fifty_zombies_warn() -> None:
    assert ObservedNode().reads(host(zombies=3)).verdict("zombies") is Verdict.OK
    assert ObservedNode().reads(host(zombies=51)).verdict("zombies") is Verdict.WARN
