"""Checks of GPUs and of their interconnects."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rrl.config.health_rules import Expect, GpuRules, Rules
from rrl.core.types import Cause, Remedy, Verdict
from rrl.health.checks.node_state import ALL_GPUS
from rrl.health.readers.samples import GpuProcess, HostData, KernelEvent, NvLink, NvmlData, StuckProcess
from rrl.tests.support.health.simulated_node import LINKS, ObservedNode, gpu, host

EIGHT = Rules(expect=Expect(gpus=8))


def test_healthy_node_passes_every_nvml_check() -> None:
    node = ObservedNode().gpus(times=5)
    assert {one.verdict for one in node.found if one.detector.startswith(("gpu", "nvlink", "pcie"))} == {Verdict.OK}


@pytest.mark.parametrize(
    ("check", "fields", "remedy"),
    [
        ("gpu_recovery_action", {"recovery_action": "gpu_reset"}, Remedy.RESET_GPU),
        ("gpu_recovery_action", {"recovery_action": "node_reboot"}, Remedy.REBOOT),
        ("gpu_recovery_action", {"recovery_action": "drain_p2p"}, Remedy.EXCLUDE),
        ("gpu_recovery_action", {"recovery_action": "drain_and_reset"}, Remedy.RESET_GPU),
        ("gpu_ecc_uncorrected", {"ecc_volatile_uncorrected": 1}, Remedy.RESET_GPU),
        ("gpu_row_remap", {"remap_failed": True}, Remedy.SUPPORT),
        ("gpu_retired_pages", {"retired_corrected": 60, "retired_uncorrected": 3}, Remedy.SUPPORT),
        ("gpu_lost", {"lost": "GPU is lost"}, Remedy.REBOOT),
    ],
)
def test_one_sample_with_proof_fails_at_once(check: str, fields: dict[str, Any], remedy: Remedy) -> None:
    found = ObservedNode().gpus(gpu(1, **fields)).one(check)
    assert (found.verdict, found.cause, found.remedy, found.proof) == (Verdict.FAIL, Cause.GPU, remedy, True)
    assert (found.component, found.node) == ("GPU-1", "n1")


def test_evidence_names_serial_vbios_and_driver_even_after_the_gpu_is_lost() -> None:
    named = gpu(1, serial="1650924012345", vbios="96.00.74", ecc_volatile_uncorrected=1)
    node = ObservedNode().gpus(named)
    label = node.one("gpu_ecc_uncorrected").evidence[-1].text
    assert "serial 1650924012345" in label
    assert "vbios 96.00.74" in label
    assert "driver " in label
    gone = msgspec.structs.replace(named, serial="", name="", vbios="", lost="GPU is lost")
    assert node.gpus(gone).one("gpu_lost").evidence[-1].text == label


@pytest.mark.parametrize(
    ("check", "fields"),
    [
        ("gpu_ecc_corrected", {"ecc_volatile_corrected": 50_000_001}),
        ("gpu_row_remap", {"remap_pending": True}),
        ("gpu_retired_pages", {"retired_corrected": 11}),
        ("gpu_retired_pages", {"retired_pending": True}),
        ("gpu_temperature", {"temperature": 87}),
        ("gpu_temperature", {"temperature_memory": 96}),
        ("pcie_link", {"pcie_width": 8}),
        ("nvlink_state", {"nvlinks": LINKS[:3]}),
        ("gpu_versions", {"vbios": "96.01"}),
    ],
)
def test_gpu_condition_that_needs_no_repair_warns_and_clears(check: str, fields: dict[str, Any]) -> None:
    node = ObservedNode().gpus(gpu(1, **fields), times=20)
    assert node.verdict(check) is Verdict.WARN
    assert node.gpus(times=2).verdict(check) is Verdict.OK


@pytest.mark.parametrize(
    ("check", "field"),
    [
        ("gpu_recovery_action", "recovery_action"),
        ("gpu_ecc_corrected", "ecc_volatile_corrected"),
        ("gpu_temperature", "temperature"),
        ("gpu_throttle", "clock_reasons"),
        ("nvlink_errors", "nvlinks"),
        ("nvlink_fabric", "fabric_state"),
        ("pcie_replays", "pcie_replays"),
        ("gpu_memory", "memory_used"),
    ],
)
def test_value_that_a_gpu_does_not_report_is_unknown_with_the_reason(check: str, field: str) -> None:
    blank = {"temperature_memory": None} if field == "temperature" else {}
    silent = [gpu(i, **{field: None}, **blank, unread={field: "not supported"}) for i in range(2)]
    node = ObservedNode().gpus(*silent, times=5)
    assert node.verdict(check) is Verdict.UNKNOWN
    assert node.text(check) == "cannot be known here: not supported (GPU 0, 1)"


def test_failed_gpu_stays_failed_without_samples_and_clears_after_two_passes() -> None:
    node = ObservedNode().gpus(gpu(0, recovery_action="gpu_reset"))
    node.gpus(gpu(0, recovery_action=None, unread={"recovery_action": "timeout"}), times=3)
    assert node.verdict("gpu_recovery_action") is Verdict.FAIL
    node.cannot("nvml")
    assert node.verdict("gpu_recovery_action") is Verdict.FAIL
    assert node.gpus().verdict("gpu_recovery_action") is Verdict.FAIL
    assert node.gpus().verdict("gpu_recovery_action") is Verdict.OK


# ── presence ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_unknown_error_of_all_gpus_at_once_warns_as_a_software_cause() -> None:
    gone = [gpu(i, lost="Unknown Error") for i in range(2)]
    found = ObservedNode().gpus(times=2).gpus(*gone, times=60).one("gpu_lost")
    assert (found.verdict, found.cause, found.remedy) == (Verdict.WARN, Cause.SOFTWARE, Remedy.SUPPORT)


def test_unknown_error_fails_if_it_persists_and_lost_gpu_fails_at_once() -> None:
    node = ObservedNode().gpus(times=2).gpus(gpu(0, lost="Unknown Error"), times=9)
    assert node.verdict("gpu_lost") is Verdict.WARN
    found = node.gpus(gpu(0, lost="Unknown Error")).one("gpu_lost")
    assert (found.verdict, found.remedy, found.proof) == (Verdict.FAIL, Remedy.REBOOT, False)
    lost = [gpu(i, lost="GPU is lost") for i in range(2)]
    assert {one.proof for one in ObservedNode().gpus(*lost).of("gpu_lost")} == {True}


def test_gpu_count_below_expected_fails_and_without_expectation_passes() -> None:
    found = ObservedNode(EIGHT).gpus().one("gpu_count")
    assert (found.verdict, found.remedy, found.proof) == (Verdict.FAIL, Remedy.EXCLUDE, True)
    assert ObservedNode().gpus().verdict("gpu_count") is Verdict.OK


def test_gpu_that_vanishes_fails_gpu_count_without_an_expected_count() -> None:
    node = ObservedNode().gpus().reads(NvmlData(driver="570.1", gpus=(gpu(0),)))
    assert (node.one("gpu_count").verdict, node.one("gpu_count").remedy) == (Verdict.FAIL, Remedy.REBOOT)


def test_node_without_a_driver_is_unknown_and_fails_only_if_gpus_are_expected() -> None:
    nothing = ObservedNode().cannot("nvml", "absent", "no NVIDIA driver")
    assert nothing.text("gpu_count") == "cannot be known here: nvml: no NVIDIA driver"
    assert nothing.verdict("readers") is Verdict.OK
    expected = ObservedNode(EIGHT).cannot("nvml", "absent", "no NVIDIA driver")
    assert expected.verdict("readers") is Verdict.UNKNOWN
    assert not any(one.verdict in (Verdict.FAIL, Verdict.WARN) for one in expected.found)


# ── counters and temperature ─────────────────────────────────────────────────────────────────────────────────────────
def test_ecc_errors_from_before_monitoring_pass_and_new_ones_fail() -> None:
    old = {"ecc_volatile_uncorrected": 0, "ecc_aggregate_uncorrected": 12}
    node = ObservedNode().gpus(gpu(0, **old), times=3)
    assert node.verdict("gpu_ecc_uncorrected") is Verdict.OK
    node.gpus(gpu(0, **{**old, "ecc_aggregate_uncorrected": 13}))
    assert node.verdict("gpu_ecc_uncorrected") is Verdict.FAIL


def test_ecc_total_that_drops_and_returns_passes_and_one_above_its_maximum_fails() -> None:
    def with_total(total: int) -> Any:
        return gpu(0, ecc_aggregate_uncorrected=total)

    node = ObservedNode().gpus(with_total(7), times=3).gpus(with_total(0), times=40).gpus(with_total(7), times=3)
    assert node.verdict("gpu_ecc_uncorrected") is Verdict.OK
    assert node.gpus(with_total(8)).verdict("gpu_ecc_uncorrected") is Verdict.FAIL


def test_high_rate_of_corrected_errors_warns_and_low_rate_does_not() -> None:
    for rate, verdict in ((10, Verdict.OK), (150, Verdict.WARN)):
        node = ObservedNode()
        for second in range(120):
            node.gpus(gpu(0, ecc_volatile_corrected=rate * second))
        assert node.verdict("gpu_ecc_corrected") is verdict
    assert node.passes(90).gpus(gpu(0, ecc_volatile_corrected=150 * 119), times=2).verdict("gpu_ecc_corrected") is (
        Verdict.OK
    )


def test_corrected_errors_over_minutes_warn_even_below_the_rate_limit() -> None:
    node = ObservedNode()
    for tick in range(34):
        node.gpus(gpu(0, ecc_volatile_corrected=600 * tick)).passes(9)
        assert node.verdict("gpu_ecc_corrected") is Verdict.OK, tick
    for tick in range(34, 40):
        node.gpus(gpu(0, ecc_volatile_corrected=600 * tick)).passes(9)
    assert node.verdict("gpu_ecc_corrected") is Verdict.WARN
    node.passes(3600).gpus(gpu(0, ecc_volatile_corrected=600 * 39), times=2)
    assert node.verdict("gpu_ecc_corrected") is Verdict.OK


def test_pages_retired_during_monitoring_fail_from_fifteen_on() -> None:
    node = ObservedNode().gpus(gpu(0, retired_corrected=8, retired_uncorrected=5))
    node.gpus(gpu(0, retired_corrected=8, retired_uncorrected=8))
    assert node.verdict("gpu_retired_pages") is Verdict.FAIL


def test_high_temperature_fails_only_if_it_lasts() -> None:
    node = ObservedNode().gpus(gpu(0, temperature=90), times=29, every=10)
    assert node.verdict("gpu_temperature") is Verdict.WARN
    node.gpus(gpu(0, temperature=90), times=5, every=10)
    found = node.one("gpu_temperature")
    assert (found.verdict, found.remedy, found.proof) == (Verdict.FAIL, Remedy.EXCLUDE, False)


def test_separate_periods_of_high_temperature_are_not_added_up() -> None:
    node = ObservedNode()
    for _ in range(20):
        node.gpus(gpu(0, temperature=90), times=5, every=10).gpus(times=1, every=10)
    assert node.verdict("gpu_temperature") is Verdict.WARN


def test_power_cap_passes_and_lasting_thermal_slowdown_warns() -> None:
    assert ObservedNode().gpus(gpu(0, clock_reasons=("sw_power_cap",)), times=30).verdict("gpu_throttle") is Verdict.OK
    node = ObservedNode().gpus(gpu(0, clock_reasons=("hw_thermal",)), times=9)
    assert node.verdict("gpu_throttle") is Verdict.OK
    assert node.gpus(gpu(0, clock_reasons=("hw_thermal",))).verdict("gpu_throttle") is Verdict.WARN
    assert node.gpus(times=9).verdict("gpu_throttle") is Verdict.WARN
    assert node.gpus().verdict("gpu_throttle") is Verdict.OK


def test_a_busy_gpu_with_a_low_clock_is_evidence_of_a_straggler_and_an_idle_one_is_not() -> None:
    assert ObservedNode().gpus(gpu(0, clock_sm=900), times=10).verdict("gpu_clock") is Verdict.WARN
    idle = gpu(0, clock_sm=345, utilization=0, clock_reasons=("gpu_idle",), pcie_gen=1)
    node = ObservedNode().gpus(idle, times=10)
    assert (node.verdict("gpu_clock"), node.verdict("pcie_link")) == (Verdict.OK, Verdict.OK)
    capped = ObservedNode().gpus(gpu(0, clock_sm=900, clock_reasons=("sw_power_cap",)), times=10)
    assert capped.verdict("gpu_clock") is Verdict.OK


# ── GPUs before a role starts ────────────────────────────────────────────────────────────────────────────────────────
def test_used_memory_and_foreign_processes_matter_only_before_a_role_starts() -> None:
    used = gpu(0, memory_used=2**30, processes=(GpuProcess(77, 1001, 2**30),))
    node = ObservedNode().gpus(used, times=5)
    assert (node.verdict("gpu_memory"), node.verdict("gpu_processes")) == (Verdict.OK, Verdict.OK)
    node.node_state.set_expected_free([ALL_GPUS])
    node.gpus(used)
    assert (node.verdict("gpu_memory"), node.verdict("gpu_processes")) == (Verdict.WARN, Verdict.WARN)
    node.gpus(used, times=9)
    for check in ("gpu_memory", "gpu_processes"):
        found = node.one(check)
        assert (found.verdict, found.cause, found.remedy) == (Verdict.FAIL, Cause.USER, Remedy.NONE)


def test_gpus_of_other_jobs_need_not_be_free() -> None:
    node = ObservedNode()
    node.node_state.set_expected_free(["1"])
    node.gpus(gpu(0, memory_used=2**34, processes=(GpuProcess(77, 1001, 2**34),)), times=5)
    assert (node.verdict("gpu_memory"), node.verdict("gpu_processes")) == (Verdict.OK, Verdict.OK)


def test_memory_reserved_by_the_driver_does_not_count_as_used() -> None:
    node = ObservedNode()
    node.node_state.set_expected_free([ALL_GPUS])
    assert node.gpus(gpu(0, memory_used=500 * 2**20), times=5).verdict("gpu_memory") is Verdict.OK


def test_driver_or_vbios_other_than_expected_warns() -> None:
    node = ObservedNode(Rules(expect=Expect(driver="570.1", vbios="96.00"))).gpus()
    assert node.verdict("gpu_versions") is Verdict.OK
    assert ObservedNode(Rules(expect=Expect(driver="575.2"))).gpus().verdict("gpu_versions") is Verdict.WARN


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _links(**fields: Any) -> tuple[NvLink, ...]:
    return (msgspec.structs.replace(LINKS[0], **fields), *LINKS[1:])


def test_link_that_goes_down_fails_after_three_samples() -> None:
    node = ObservedNode().gpus().gpus(gpu(0, nvlinks=_links(active=False)), times=2)
    assert node.verdict("nvlink_state") is Verdict.WARN
    assert "FAIL only after 3 failing runs in a row" in node.text("nvlink_state")
    found = node.gpus(gpu(0, nvlinks=_links(active=False))).one("nvlink_state")
    assert (found.verdict, found.remedy) == (Verdict.FAIL, Remedy.EXCLUDE)


def test_links_that_were_never_active_are_not_reported() -> None:
    never = tuple(NvLink(link=i, active=False) for i in range(4))
    node = ObservedNode().gpus(gpu(0, nvlinks=never), gpu(1, nvlinks=never), times=5)
    assert node.verdict("nvlink_state") is Verdict.OK


def test_one_burst_of_link_errors_warns_and_errors_in_most_windows_fail() -> None:
    node = ObservedNode().gpus(times=2).gpus(gpu(0, nvlinks=_links(replay=3)), times=10)
    assert node.verdict("nvlink_errors") is Verdict.WARN
    for count in range(4, 22):
        node.gpus(gpu(0, nvlinks=_links(replay=count)), every=60)
    found = node.one("nvlink_errors")
    assert (found.verdict, found.component) == (Verdict.FAIL, "GPU-0/nvlink0")


def test_link_errors_before_monitoring_are_ignored_and_later_ones_expire_with_their_windows() -> None:
    node = ObservedNode().gpus(gpu(0, nvlinks=_links(replay=9999)), times=3)
    assert node.verdict("nvlink_errors") is Verdict.OK
    node.gpus(gpu(0, nvlinks=_links(replay=10_000)))
    assert node.verdict("nvlink_errors") is Verdict.WARN
    node.passes(31 * 60).gpus(gpu(0, nvlinks=_links(replay=10_000)), times=3)
    assert node.verdict("nvlink_errors") is Verdict.OK


def test_flood_of_crc_errors_fails() -> None:
    node = ObservedNode().gpus()
    for second in range(1, 40):
        node.gpus(gpu(0, nvlinks=_links(crc_flit=200 * second)))
    assert node.verdict("nvlink_errors") is Verdict.FAIL


@pytest.mark.parametrize("state", ["in_progress", "not_started"])
def test_fabric_registration_of_a_gpu_may_take_two_minutes(state: str) -> None:
    node = ObservedNode().gpus(gpu(0, fabric_state=state, fabric_status=None), times=120)
    assert node.verdict("nvlink_fabric") is Verdict.WARN
    node.gpus(gpu(0, fabric_state=state, fabric_status=None), times=3)
    found = node.one("nvlink_fabric")
    assert (found.verdict, found.remedy) == (Verdict.FAIL, Remedy.EXCLUDE)


def test_time_limit_of_fabric_registration_restarts_with_each_registration() -> None:
    node = ObservedNode().gpus(gpu(0, fabric_state="in_progress"), times=100).gpus(times=2)
    assert node.verdict("nvlink_fabric") is Verdict.OK
    assert node.gpus(gpu(0, fabric_state="in_progress"), times=100).verdict("nvlink_fabric") is Verdict.WARN


def test_failed_fabric_registration_fails_after_three_samples() -> None:
    node = ObservedNode().gpus(gpu(0, fabric_status="failure"), times=2)
    assert node.verdict("nvlink_fabric") is Verdict.WARN
    assert node.gpus(gpu(0, fabric_status="failure")).verdict("nvlink_fabric") is Verdict.FAIL


def test_gpu_without_a_fabric_passes_the_fabric_check() -> None:
    no_fabric = gpu(0, fabric_state="not_supported", fabric_status=None)
    assert ObservedNode().gpus(no_fabric, times=5).verdict("nvlink_fabric") is Verdict.OK


@pytest.mark.parametrize(("gen", "lanes", "usual"), [(4, 16, 16), (5, 16, 31), (3, 8, 4)])
def test_pcie_replays_are_judged_by_generation_and_lanes(gen: int, lanes: int, usual: int) -> None:
    def with_replays(n: int) -> Any:
        return gpu(0, pcie_replays=n, pcie_gen=gen, pcie_gen_max=gen, pcie_width=lanes, pcie_width_max=lanes)

    node = ObservedNode().gpus(with_replays(1000)).gpus(with_replays(1000 + usual))
    assert node.verdict("pcie_replays") is Verdict.OK
    node.gpus(with_replays(1000 + usual + 1))
    assert (node.verdict("pcie_replays"), node.one("pcie_replays").remedy) == (Verdict.WARN, Remedy.SUPPORT)
    node.passes(120).gpus(with_replays(1000 + usual + 1), times=2)
    assert node.verdict("pcie_replays") is Verdict.OK


# ── readers that hang ────────────────────────────────────────────────────────────────────────────────────────────────
def test_hung_nvml_is_unknown_then_warns_until_a_second_witness_of_the_driver_hangs_too() -> None:
    node = ObservedNode().reads(host()).gpus()
    for _ in range(6):
        node.cannot("nvml").passes(10)
    assert node.verdict("readers") is Verdict.UNKNOWN
    for _ in range(3):
        node.cannot("nvml").passes(10)
    found = next(one for one in node.of("readers") if one.component == "nvml")
    assert (found.verdict, found.cause, found.remedy) == (Verdict.WARN, Cause.GPU, Remedy.SUPPORT), (
        "NVML must warn after it has hung for a minute"
    )
    assert not any(one.verdict is Verdict.FAIL for one in node.found)
    node.cannot("dcgm").passes(58).reads(host())
    assert node.verdict("readers") is Verdict.WARN
    node.reads(host())
    found = next(one for one in node.of("readers") if one.component == "nvml")
    assert (found.verdict, found.remedy, found.proof) == (Verdict.FAIL, Remedy.REBOOT, True)
    assert node.gpus(times=2).verdict("readers") is Verdict.UNKNOWN, (
        "the readers must be UNKNOWN while DCGM still hangs"
    )


def test_driver_blocked_by_a_gpu_reset_does_not_fail_the_node() -> None:
    node = ObservedNode().reads(host()).gpus()
    for _ in range(4):
        node.cannot("nvml").cannot("dcgm").passes(8)
    assert node.verdict("readers") is Verdict.UNKNOWN
    assert node.gpus().passes(40).cannot("nvml").passes(30).cannot("nvml").verdict("readers") is Verdict.UNKNOWN


def test_hung_nvml_and_process_stuck_in_its_driver_fail_after_a_minute() -> None:
    stuck = host(
        stuck=(StuckProcess(pid=9, uid=1001, name="python", seconds=40, kernel_function="nvidia_unlocked_ioctl"),)
    )
    node = ObservedNode().reads(stuck).cannot("nvml").passes(58).reads(stuck)
    assert node.verdict("readers") is Verdict.UNKNOWN
    assert node.reads(stuck).verdict("readers") is Verdict.FAIL, (
        "after a gap in the samples, the deadline started again"
    )


@pytest.mark.parametrize(
    ("name", "uid", "verdict"),
    [
        ("nvidia-smi", 0, Verdict.FAIL),
        ("nvme-wq", 0, Verdict.WARN),
        ("nvidia-smi", 1001, Verdict.WARN),  # a user's program may have this name
        ("nvidia-smi", None, Verdict.WARN),
    ],
)
def test_driver_task_that_the_kernel_reports_as_hung_is_a_second_witness(
    name: str, uid: int | None, verdict: Verdict
) -> None:
    text = f"INFO: task {name}:771 blocked for more than 120 seconds."
    line = KernelEvent(kind="hung_task", text=text, pid=771, uid=uid)
    node = ObservedNode().log(line).passes(5).cannot("nvml").passes(130).log()
    assert node.verdict("readers") is Verdict.WARN, "a hung task from before NVML's hang counts as a second witness"
    assert node.log(line).verdict("readers") is verdict


def test_process_stuck_outside_of_the_driver_is_no_witness_of_the_driver() -> None:
    stuck: HostData = host(
        stuck=(StuckProcess(pid=9, uid=1001, name="cp", seconds=40, kernel_function="nfs_wait_bit_killable"),)
    )
    node = ObservedNode().reads(stuck)
    for _ in range(6):
        node.cannot("nvml")
    assert node.verdict("readers") is Verdict.UNKNOWN


# ── modes and rules ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_check_in_mode_observe_only_warns_and_in_mode_off_reports_nothing() -> None:
    bad = gpu(0, ecc_volatile_uncorrected=1)
    observed = ObservedNode(Rules(checks={"gpu_ecc_uncorrected": "observe"})).gpus(bad).one("gpu_ecc_uncorrected")
    assert (observed.verdict, observed.remedy, observed.proof) == (Verdict.WARN, Remedy.NONE, False)
    assert observed.evidence[-1].text == "observe only: no action is taken"
    assert ObservedNode(Rules(checks={"gpu_ecc_uncorrected": "off"})).gpus(bad).of("gpu_ecc_uncorrected") == []


def test_findings_of_an_unchanged_situation_are_equal_and_keep_their_times() -> None:
    def bad(count: int) -> Any:
        return gpu(0, ecc_volatile_uncorrected=count, temperature=80 + count, ecc_volatile_corrected=count)

    node = ObservedNode().gpus(bad(7))
    first = node.found
    for count in range(8, 30):
        node.gpus(bad(count))
        assert node.one("gpu_ecc_uncorrected") == first[[f.detector for f in first].index("gpu_ecc_uncorrected")]


def test_changed_rules_do_not_clear_a_failure() -> None:
    node = ObservedNode().gpus(gpu(0, recovery_action="gpu_reset"))
    node.rules = Rules(gpu=GpuRules(hot=100))
    assert node.check_again().verdict("gpu_recovery_action") is Verdict.FAIL


def test_repeated_check_without_a_new_reading_changes_nothing() -> None:
    node = ObservedNode().gpus().gpus(gpu(0, fabric_state="in_progress"))
    before = node.found
    for _ in range(5):
        assert node.check_again().found == before


def test_every_finding_has_a_unique_key() -> None:
    ill = [gpu(i, temperature=99, recovery_action="node_reboot", pcie_width=8) for i in range(2)]
    node = ObservedNode(EIGHT).gpus(*ill, times=5).xid(79).cannot("kernel", "broken", "x").cannot("nvml")
    keys = [one.key for one in node.found]
    assert len(set(keys)) == len(keys)
