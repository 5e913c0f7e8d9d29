"""Xids: the catalogue, and the findings from it."""

from __future__ import annotations

import pytest

from rrl.config.health_rules import Rules, XidRules
from rrl.core.types import Cause, Remedy, Verdict
from rrl.health.checks.xid_events import catalogue, is_fatal, parse_recovery_action, xid
from rrl.health.readers.samples import DcgmData, DcgmGpu, GpuXid, KernelEvent
from rrl.tests.support.health.simulated_node import ObservedNode, gpu

HOUR = 3600.0
TABLE_5B = {
    "node_out": "79 151 160",
    "gpu_reset": "46 48 62 64 95 109 110 119 120 136 140 143 155 156 158 162",
    "nvlink": "74 144-150",
    "app": "8 11 13 25 31 32 39-41 60 68-72 75-77 80 82-86 88-89 94 96-105 126-135 139",
    "ignore": "14 37 38 43 44 45 63 66 67 93 106 107 121 137 141 152-154 157 161",
    "service": "54 78 92 159",
    "rest": "1-7 9 10 12 15-24 26-30 33-36 42 47 49-53 55-59 61 65 73 81 87 90 91 108 111-118 122-125 138 142 163-172",
}
"""The classes of Xids from the sources in docs/sources.md. Only the class of 92, which the sources ignore, is rrl's."""


@pytest.fixture
def node() -> ObservedNode:
    return ObservedNode().gpus()


def _codes(text: str) -> set[int]:
    spans = [(part.partition("-")[0], part.partition("-")[2] or part) for part in text.split()]
    return {code for first, last in spans for code in range(int(first), int(last) + 1)}


def test_every_code_of_the_table_is_in_the_catalogue_with_its_class() -> None:
    for kind, text in TABLE_5B.items():
        assert {code for code, one in catalogue().items() if one.kind == kind} == _codes(text)
    assert all(one.meaning and one.source and one.fault for one in catalogue().values())


def test_unknown_xid_has_class_rest_and_a_site_may_reclassify_any_xid() -> None:
    assert xid(999, XidRules()).kind == "rest"
    ours = xid(109, XidRules(classes={"109": "app"}))
    assert (ours.kind, ours.action, ours.source) == ("app", Remedy.RESTART, "site")


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        ("0x0 (None) to 0x1 (GPU Reset Required)", (True, Remedy.RESET_GPU)),
        ("0x0 (None) to 0x2 (Node Reboot Required)", (True, Remedy.REBOOT)),
        ("0x0 (None) to 0x3 (Drain P2P)", (True, Remedy.EXCLUDE)),
        ("0x0 (None) to 0x4 (Drain and Reset)", (True, Remedy.RESET_GPU)),
        ("0x1 (GPU Reset Required) to 0x0 (None)", (True, None)),
        ("0x0 (None) to 0x9 (Something New)", (False, None)),
    ],
)
def test_text_of_xid_154_states_the_recovery_action(text: str, expected_text: tuple[bool, Remedy | None]) -> None:
    assert (
        parse_recovery_action(f"NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from {text}")
        == expected_text
    )


def test_non_fatal_text_is_not_parsed_as_fatal() -> None:
    assert is_fatal("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00")
    assert not any(map(is_fatal, ("Nonfatal", "Non-fatal", "non fatal", "", "NETIR_LINK_EVT")))


# ── Xids that fail a node ────────────────────────────────────────────────────────────────────────────────────────────
LOST = gpu(0, lost="GPU is lost", temperature=None, recovery_action=None)


def test_gpu_off_the_bus_fails_as_soon_as_nvml_loses_it() -> None:
    node = ObservedNode().gpus().xid(79).gpus(LOST)
    found = node.one("xid")
    assert (found.verdict, found.remedy, found.cause, found.proof) == (Verdict.FAIL, Remedy.REBOOT, Cause.GPU, True)
    assert found.component == "GPU-0"
    assert "fallen off the bus" in found.evidence[0].text


@pytest.mark.parametrize("code", [48, 62, 64, 95, 119, 120, 140, 158])
def test_xid_that_needs_a_reset_fails_with_remedy_reset_gpu(code: int) -> None:
    found = ObservedNode().gpus().xid(code).one("xid")
    assert (found.verdict, found.remedy, found.proof) == (Verdict.FAIL, Remedy.RESET_GPU, True)


@pytest.mark.parametrize("code", sorted(_codes(TABLE_5B["app"])))
def test_application_xid_alone_does_not_fail_the_node(code: int) -> None:
    node = ObservedNode().gpus().xid(code)
    assert (node.verdict("xid"), node.one("xid").remedy) == (Verdict.WARN, Remedy.NONE)


@pytest.mark.parametrize("code", sorted(_codes(TABLE_5B["ignore"])))
def test_xid_45_and_recorded_only_xids_are_never_a_cause(code: int) -> None:
    node = ObservedNode().gpus().xid(code).passes(400).xid(code).passes(400).xid(code)
    assert node.verdict("xid") is Verdict.OK


def test_xid_45_beside_another_xid_adds_no_finding() -> None:
    node = ObservedNode().gpus().xid(45).xid(95).xid(45, index=1)
    assert [one.component for one in node.of("xid")] == ["GPU-0"]
    assert "45" not in node.text("xid")


def test_recovery_action_of_the_driver_overrides_that_of_the_catalogue() -> None:
    node = (
        ObservedNode()
        .gpus()
        .xid(95)
        .xid(154, text="GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)")
    )
    found = node.gpus(gpu(0, recovery_action="node_reboot")).one("xid")
    assert (found.verdict, found.remedy, found.proof) == (Verdict.FAIL, Remedy.REBOOT, True)
    assert "Xid 95" in node.text("xid")


def test_xid_clears_once_the_driver_reports_that_no_action_is_needed() -> None:
    node = ObservedNode().gpus().xid(119).passes(200)
    assert node.verdict("xid") is Verdict.FAIL
    node.xid(154, text="GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)").gpus(times=3)
    assert node.verdict("xid") is Verdict.OK


def test_xid_154_without_action_text_has_no_effect() -> None:
    assert ObservedNode().gpus().gpus(xids=(GpuXid("GPU-0", 154),)).verdict("xid") is Verdict.OK


# ── repeated Xids ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_repeated_application_xid_on_one_gpu_warns_and_under_two_roles_fails(node: ObservedNode) -> None:
    node.node_state.set_tenant(["GPU-0"], "rollout", "rollout/0#1")
    node.xid(31).passes(HOUR).xid(31)
    assert node.verdict("xid") is Verdict.WARN
    assert "suspect the hardware" in node.text("xid")
    node.node_state.set_tenant(["GPU-0"], "trainer", "trainer/0#2")
    node.passes(HOUR).xid(31)
    found = node.one("xid")
    assert (found.verdict, found.remedy, found.cause) == (Verdict.FAIL, Remedy.EXCLUDE, Cause.GPU)
    assert not found.proof


def test_application_xid_on_different_gpus_under_two_roles_only_warns(node: ObservedNode) -> None:
    for role, incarnation in (("rollout", "rollout/0#1"), ("trainer", "trainer/0#1")):
        node.node_state.set_tenant(["GPU-0", "GPU-1"], role, incarnation)
        node.passes(HOUR).xid(13).xid(13, index=1)
    assert {one.verdict for one in node.of("xid")} == {Verdict.WARN}
    assert "suspect" not in node.text("xid")


def test_xid_is_forgotten_after_a_day() -> None:
    node = ObservedNode().gpus().xid(13).passes(25 * HOUR).xid(13)
    assert "suspect" not in node.text("xid")
    assert node.passes(25 * HOUR).gpus(times=3).verdict("xid") is Verdict.OK


def test_one_nvlink_error_warns_and_a_fatal_or_second_one_fails() -> None:
    assert ObservedNode().gpus().xid(74).verdict("xid") is Verdict.WARN
    assert ObservedNode().gpus().xid(149, text="NETIR_LINK_EVT Fatal XC0").verdict("xid") is Verdict.FAIL
    again = ObservedNode().gpus().xid(145, text="RLW Nonfatal").passes(HOUR).xid(145, text="RLW Nonfatal")
    assert (again.verdict("xid"), again.one("xid").remedy) == (Verdict.FAIL, Remedy.SUPPORT)


def test_five_fatal_xids_within_a_day_need_support(node: ObservedNode) -> None:
    for _ in range(5):
        node.xid(119).passes(HOUR)
    assert node.check_again().one("xid").remedy is Remedy.SUPPORT


@pytest.mark.parametrize("code", [1, 61, 142, 170, 999])
def test_rare_xid_warns_and_fails_only_near_the_death_of_a_role(code: int) -> None:
    node = ObservedNode().gpus().xid(code)
    assert node.verdict("xid") is Verdict.WARN
    node.node_state.on_role_death(["GPU-1"], node.now)
    assert node.check_again().verdict("xid") is Verdict.WARN, "the death of a role on another GPU counts"
    node.node_state.on_role_death(["GPU-0"], node.now + 30)
    found = node.check_again().one("xid")
    assert (found.verdict, found.remedy) == (Verdict.FAIL, Remedy.EXCLUDE)


def test_role_that_died_long_after_the_xid_is_no_evidence() -> None:
    node = ObservedNode().gpus().xid(61)
    node.node_state.on_role_death(["GPU-0"], node.now + 120)
    assert node.check_again().verdict("xid") is Verdict.WARN


def test_xid_of_a_missing_power_cable_warns_and_needs_support() -> None:
    found = ObservedNode().gpus().xid(54).one("xid")
    assert (found.verdict, found.remedy) == (Verdict.WARN, Remedy.SUPPORT)


# ── Xids around the end of a role, and their sources ─────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("code", [13, 31, 74, 54, 61])
def test_application_xid_around_our_own_kill_has_no_finding(code: int, node: ObservedNode) -> None:
    node.node_state.on_our_kill(node.now - 20)
    assert node.xid(code).verdict("xid") is Verdict.OK
    late = ObservedNode().gpus().xid(code)
    late.node_state.on_our_kill(late.now + 5)
    assert late.passes(5).gpus(times=3).verdict("xid") is Verdict.OK, "the kill was reported only after the Xid"
    later = ObservedNode().gpus()
    later.node_state.on_our_kill(later.now)
    assert later.passes(90).xid(code).verdict("xid") is Verdict.WARN


@pytest.mark.parametrize("code", [79, 95])
def test_severe_xid_around_our_own_kill_still_fails(code: int, node: ObservedNode) -> None:
    node.node_state.on_our_kill(node.now)
    assert node.xid(code).gpus(LOST).verdict("xid") is Verdict.FAIL


def test_reports_of_kernel_log_nvml_and_dcgm_are_one_event() -> None:
    node = ObservedNode().gpus().reads(DcgmData(gpus=(DcgmGpu(uuid="GPU-0", xid_counts={74: 7}),)))
    node.xid(74).gpus(xids=(GpuXid("GPU-0", 74), GpuXid("", 74)))
    node.passes(60).reads(DcgmData(gpus=(DcgmGpu(uuid="GPU-0", xid_counts={74: 9}),)))
    assert node.verdict("xid") is Verdict.WARN, "reports of one event by three sources count as several events"
    assert node.node_state.xids.events[0].sources == {"kernel", "nvml", "dcgm"}
    assert len(node.node_state.xids.events) == 1
    node.passes(200).gpus(xids=(GpuXid("GPU-0", 74),))
    assert node.verdict("xid") is Verdict.FAIL


def test_xid_reported_by_bus_before_the_first_nvml_sample_joins_its_gpu() -> None:
    node = ObservedNode().xid(79)
    assert node.one("xid").component == "0000:00:00"
    node.gpus(xids=(GpuXid("GPU-0", 79),)).gpus(times=2)
    assert [one.component for one in node.of("xid") if one.verdict is Verdict.FAIL] == ["GPU-0"]
    assert len(node.node_state.xids.events) == 1


def test_counts_of_dcgm_before_us_are_no_events() -> None:
    node = ObservedNode().reads(DcgmData(gpus=(DcgmGpu(uuid="GPU-0", xid_counts={79: 3}),)), times=3)
    assert node.verdict("xid") is Verdict.OK


def test_xid_logged_before_the_start_counts_unless_the_driver_needs_no_action() -> None:
    assert ObservedNode().gpus().xid(119, age=HOUR).verdict("xid") is Verdict.WARN
    assert ObservedNode().gpus(gpu(0, recovery_action=None)).xid(119, age=HOUR).verdict("xid") is Verdict.FAIL
    assert ObservedNode().gpus(gpu(0, recovery_action=None)).xid(119, age=30 * HOUR).verdict("xid") is Verdict.OK


def test_one_earlier_application_xid_has_no_finding_and_two_warn() -> None:
    once = ObservedNode().gpus().xid(31, age=HOUR)
    assert once.verdict("xid") is Verdict.OK
    once.xid(31, age=5 * HOUR)
    assert (once.verdict("xid"), once.one("xid").cause) == (Verdict.WARN, Cause.GPU)
    assert "suspect the hardware" in once.text("xid")


def test_unchanged_problem_gives_an_equal_finding() -> None:
    node = ObservedNode().gpus().xid(95)
    first = node.one("xid")
    for _ in range(5):
        node.passes(200).xid(95)
        last = node.one("xid")
    node.xid(95)
    assert node.one("xid") is last
    assert (last.since, last.component) == (first.since, first.component)


def test_high_rate_of_single_bit_errors_warns_and_does_not_fail() -> None:
    node = ObservedNode().gpus().xid(92).passes(400).xid(92).passes(400).xid(92)
    found = node.one("xid")
    assert (found.verdict, found.cause, found.remedy) == (Verdict.WARN, Cause.GPU, Remedy.SUPPORT)


def test_contained_error_fails_by_its_count_and_not_by_its_xid() -> None:
    node = ObservedNode().gpus(gpu(0, ecc_volatile_uncorrected=1)).xid(94)
    assert (node.verdict("xid"), node.verdict("gpu_ecc_uncorrected")) == (Verdict.WARN, Verdict.FAIL)
    alone = ObservedNode().gpus().xid(94)
    assert (alone.verdict("xid"), alone.verdict("gpu_ecc_uncorrected")) == (Verdict.WARN, Verdict.OK)


def test_fatal_sxid_of_a_switch_fails_and_a_non_fatal_one_warns() -> None:
    fatal = KernelEvent(
        kind="sxid", text="nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Fatal", pci="0000:c1:00", pci_exists=True
    )
    mild = KernelEvent(kind="sxid", text="nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Non-fatal, Link 30")
    assert ObservedNode().log(fatal).verdict("nvswitch") is Verdict.FAIL
    assert ObservedNode().log(mild).verdict("nvswitch") is Verdict.WARN


def test_xids_are_unknown_if_no_reader_receives_them() -> None:
    node = (
        ObservedNode(Rules()).cannot("kernel", "denied", "dmesg_restrict is set").cannot("nvml", "absent", "no driver")
    )
    assert node.verdict("xid") is Verdict.UNKNOWN
    assert "dmesg_restrict is set" in node.text("xid")


# ── Xids without a second witness ────────────────────────────────────────────────────────────────────────────────────
FATAL_SXID = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 3"


@pytest.mark.parametrize("exists", [False, None])
@pytest.mark.parametrize("code", [48, 79, 95, 119])
def test_an_xid_of_a_gpu_that_the_node_does_not_have_is_a_warning(code: int, exists: bool | None) -> None:
    line = KernelEvent(
        kind="xid", text=f"NVRM: Xid (PCI:0000:cb:00): {code}, x", xid=code, pci="0000:cb:00", pci_exists=exists
    )
    for node in (ObservedNode(), ObservedNode().gpus()):
        found = node.log(line).one("xid")
        assert (found.verdict, found.remedy) == (Verdict.WARN, Remedy.NONE)
        assert "no GPU is known" in found.evidence[0].text


def test_xid_without_nvml_fails_a_gpu_that_the_node_has() -> None:
    assert ObservedNode().xid(79).verdict("xid") is Verdict.FAIL


def test_an_xid_79_of_a_gpu_that_still_answers_nvml_is_a_warning() -> None:
    node = ObservedNode().gpus().xid(79)
    assert node.verdict("xid") is Verdict.WARN, "an Xid 79 must be a warning until the next NVML sample"
    assert node.gpus(times=5).verdict("xid") is Verdict.WARN
    assert "NVML reports that the GPU works" in node.text("xid")


def test_xid_79_fails_when_nvml_stops_answering() -> None:
    node = ObservedNode().gpus().xid(79).passes(10).cannot("nvml")
    assert node.verdict("xid") is Verdict.FAIL
    stale = ObservedNode().gpus().xid(79).passes(20).log()
    assert stale.verdict("xid") is Verdict.FAIL, "an Xid 79 must fail if no NVML sample comes in time"


def test_xid_79_that_nvml_also_reports_fails_at_once() -> None:
    assert ObservedNode().gpus().xid(79).gpus(xids=(GpuXid("GPU-0", 79),)).verdict("xid") is Verdict.FAIL


def test_reset_request_that_nvml_does_not_repeat_warns() -> None:
    node = (
        ObservedNode().gpus().xid(154, text="GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    )
    assert node.gpus(times=5).verdict("xid") is Verdict.WARN
    assert node.gpus(gpu(0, recovery_action="gpu_reset")).verdict("xid") is Verdict.FAIL


@pytest.mark.parametrize("exists", [False, None])
def test_a_fatal_sxid_of_a_switch_that_the_node_does_not_have_is_a_warning(exists: bool | None) -> None:
    line = KernelEvent(kind="sxid", text=FATAL_SXID, pci="0000:c1:00", pci_exists=exists)
    assert ObservedNode().log(line).verdict("nvswitch") is Verdict.WARN


def test_process_name_that_contains_fatal_does_not_make_an_nvlink_error_fatal() -> None:
    node = ObservedNode().gpus().xid(74, text="pid=4711, name=a, fatal, b, NVLink: recoverable error on link 3")
    assert node.verdict("xid") is Verdict.WARN
