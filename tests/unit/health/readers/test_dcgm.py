"""DCGM: the page of dcgm-exporter and the output of dcgmi, both in the form of the real programs.

The module of the reader names the sources of these forms.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrl.health.readers.base import NotInstalled, ReaderOptions
from rrl.health.readers.dcgm import reader as dcgm
from rrl.health.readers.dcgm.parsing import NotUnderstood, diag, health
from rrl.health.readers.dcgm.reader import DcgmReader
from rrl.health.readers.samples import DcgmData, DcgmGpu, DcgmIncident
from rrl.tests.support.dcgm.exporter import Exporter, exporter, labels, page

FAKE = str(Path(__file__).parents[3] / "support" / "dcgm" / "fake_dcgmi")
UUID = "GPU-aaaa"
OTHER = "GPU-bbbb"
GPUS = {0: UUID, 1: OTHER}
NOT_INSTALLED = "/nowhere/dcgmi"


ME = pwd.getpwuid(os.getuid()).pw_name
"""The user who runs these tests, to whom the fake exporter and host engine belong."""


@pytest.fixture(autouse=True)
def hostengine(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Listen in place of DCGM's host engine, on a free port. Yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(dcgm, "HOSTENGINE_PORT", port)
        yield port


@pytest.fixture
def metrics() -> Iterator[Exporter]:
    with exporter() as made:
        made.text = page(GPUS)
        yield made


@pytest.fixture
def replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with the replies of the fake dcgmi."""
    monkeypatch.setenv("RRL_FAKE_DCGMI", str(tmp_path))
    return tmp_path


def read(metrics: Exporter, dcgmi: str = NOT_INSTALLED, **more: Any) -> DcgmData:
    return DcgmReader(ReaderOptions(dcgm_user=ME, exporter=metrics.url, dcgmi=dcgmi, **more)).read()


def xid(index: int, uuid: str, code: int, count: int) -> str:
    more = f',window_size_in_ms="300000",xid="{code}"'
    return f"DCGM_EXP_XID_ERRORS_COUNT{labels(index, uuid, more)} {count}"


# ── exporter ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_exporter_metrics_are_grouped_by_gpu(metrics: Exporter) -> None:
    metrics.text = page(
        GPUS,
        f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{labels(0, UUID)} 0.421",
        f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{labels(1, OTHER)} 2",
        f"DCGM_FI_DEV_ROW_REMAP_FAILURE{labels(1, OTHER)} 1",
        f"DCGM_FI_DEV_ROW_REMAP_FAILURE{labels(0, UUID)} 0",
    )
    data = read(metrics)
    assert data.gpus == (
        DcgmGpu(uuid=UUID, index=0, tensor_active=0.421, remap_failed=False),
        DcgmGpu(uuid=OTHER, index=1, ecc_volatile_uncorrected=2, remap_failed=True),
    )
    assert data.unread == {"health": "/nowhere/dcgmi is not installed"}
    assert metrics.requests == ["GET /metrics HTTP/1.0"]


def test_the_gauge_of_the_last_xid_is_not_counted(metrics: Exporter) -> None:
    metrics.text = page(GPUS, f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{labels(0, UUID)} 0", last_xid=79)
    assert [gpu.xid_counts for gpu in read(metrics).gpus] == [{}]


def test_xids_of_a_moving_window_add_up_to_totals(metrics: Exporter) -> None:
    reader = DcgmReader(ReaderOptions(dcgm_user=ME, exporter=metrics.url, dcgmi=NOT_INSTALLED))
    totals = []
    for count in (2, 3, 1, 0, 1):  # Xids in the window: two, a third, only the third, none, a fourth
        metrics.text = page(GPUS, *([xid(0, UUID, 31, count)] if count else []), xid(1, OTHER, 13, 1))
        totals.append(next((gpu.xid_counts for gpu in reader.read().gpus if gpu.uuid == UUID), None))
    assert totals == [{31: 2}, {31: 3}, {31: 3}, None, {31: 4}]


def test_window_of_xids_is_ignored_if_the_exporter_has_a_true_xid_counter(metrics: Exporter) -> None:
    reader = DcgmReader(ReaderOptions(dcgm_user=ME, exporter=metrics.url, dcgmi=NOT_INSTALLED))
    totals = []
    for total, window in ((2, 2), (3, 1), (3, 0)):
        which = labels(0, UUID, ',xid="31"')
        counter = f"DCGM_EXP_XID_ERRORS_TOTAL{which} {total}"
        metrics.text = page(GPUS, counter, *([xid(0, UUID, 31, window)] if window else []))
        totals.append(next(gpu.xid_counts for gpu in reader.read().gpus if gpu.uuid == UUID))
    assert totals == [{31: 2}, {31: 3}, {31: 3}]


def test_tensor_activity_of_a_gpu_with_instances_is_that_of_its_busiest_one(metrics: Exporter) -> None:
    lines = (
        f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{labels(0, UUID, f',GPU_I_ID={i!r}'.replace(chr(39), chr(34)))} 0.{i}"
        for i in ("1", "7", "3")
    )
    metrics.text = page(GPUS, *lines)
    assert [gpu.tensor_active for gpu in read(metrics).gpus] == [0.7]


@pytest.mark.parametrize(
    "bad",
    [
        'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",UUID="GPU-aaaa"} NaN',
        'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="0",UUID="GPU-aaaa"} 9223372036854775794',
        'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="0",UUID="GPU-aaaa"} many',
        'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="0",UUID="GPU-aaaa"}',
        'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="0",UUID="GPU-aa',
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL 5",
        'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL_NEW{gpu="0",UUID="GPU-aaaa"} 5',
        "\x00\x01{",
    ],
)
def test_malformed_lines_and_blank_values_of_the_exporter_are_skipped(metrics: Exporter, bad: str) -> None:
    metrics.text = page(GPUS, bad, f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{labels(1, OTHER)} 1 1700000000000")
    assert [(gpu.uuid, gpu.ecc_volatile_uncorrected) for gpu in read(metrics).gpus] == [(OTHER, 1)]


def test_label_values_may_contain_braces_commas_and_quotes(metrics: Exporter) -> None:
    more = r',pod="a}b,c=\"d\" {",err_msg="x\\y"'
    metrics.text = page(GPUS, f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{labels(0, UUID, more)} 4")
    assert [gpu.ecc_volatile_uncorrected for gpu in read(metrics).gpus] == [4]


def test_hung_exporter_is_unread_within_its_timeout(
    metrics: Exporter, replies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcgm, "_EXPORTER_TIMEOUT_S", 0.3)
    metrics.hangs.set()
    data = read(metrics, FAKE)
    assert data.unread["exporter"] == f"{metrics.url} did not answer within 0.3 s"


def test_http_error_of_the_exporter_is_the_reason_for_unread_values(metrics: Exporter, replies: Path) -> None:
    metrics.status = "500 Internal Server Error"
    assert read(metrics, FAKE).unread["exporter"] == f"{metrics.url}: HTTP/1.0 500 Internal Server Error"


def test_dcgm_reader_is_absent_without_exporter_and_dcgmi() -> None:
    reader = DcgmReader(ReaderOptions(dcgm_user=ME, exporter="http://127.0.0.1:1/metrics", dcgmi=NOT_INSTALLED))
    with pytest.raises(
        NotInstalled, match=r"no dcgm-exporter \(http://127.0.0.1:1/metrics: no process listens on port 1"
    ):
        reader.read()


def test_exporter_address_other_than_plain_http_is_not_read() -> None:
    with pytest.raises(NotInstalled, match="it must be http://"):
        DcgmReader(ReaderOptions(dcgm_user=ME, exporter="https://127.0.0.1/metrics", dcgmi=NOT_INSTALLED)).read()


# ── dcgmi health ─────────────────────────────────────────────────────────────────────────────────────────────────────
def report(**groups: dict[str, dict[str, tuple[str, list[str]]]]) -> str:
    """Return dcgmi's report as Health.cpp builds it: group → entity → system → (health, pieces of the message)."""
    body: dict[str, Any] = {"Overall Health": {"value": "Failure" if groups else "Healthy"}}
    for group, entities in groups.items():
        body[group] = {
            "children": {
                entity: {
                    "value": "Failure",
                    "children": {
                        "Errors": {
                            "children": {
                                system: {"value": value, "overflow": pieces}
                                for system, (value, pieces) in systems.items()
                            }
                        }
                    },
                }
                for entity, systems in entities.items()
            }
        }
    return json.dumps({"header": ["Health Monitor Report"], "body": body})


def test_a_healthy_node_has_no_incidents() -> None:
    assert health(report(), {}) == ()


def test_health_incidents_name_gpu_system_and_code() -> None:
    text = report(
        GPU={
            "0": {"Memory system": ("Failure", ["Detected 3 volatile double-bit ECC error(s) in GPU", "0."])},
            "1": {"NVLINK system": ("Warning", ["GPU 1's NvLink link 3 is currently down"])},
            "2": {"Thermal system": ("Warning", ["something that a later DCGM says"])},
        }
    )
    assert health(text, {"0": UUID}) == (
        DcgmIncident(
            UUID, "Memory", "VOLATILE_DBE_DETECTED", "fail", "Detected 3 volatile double-bit ECC error(s) in GPU 0."
        ),
        DcgmIncident("1", "NVLINK", "NVLINK_DOWN", "warn", "GPU 1's NvLink link 3 is currently down"),
        DcgmIncident("2", "Thermal", "", "warn", "something that a later DCGM says"),
    )


def test_concatenated_health_messages_are_separate_incidents() -> None:
    messages = [
        "GPU 0 had uncorrectable memory errors and row remapping failed., GPU had an",
        "uncontained error (XID 95)",
    ]
    found = health(report(GPU={"0": {"Memory system": ("Failure", messages)}}), {})
    assert {incident.code for incident in found} == {"ROW_REMAP_FAILURE", "UNCONTAINED_ERROR"}


def test_incident_of_a_switch_names_no_gpu() -> None:
    (found,) = health(
        report(Switch={"2": {"NVLINK system": ("Failure", ["Detected fatal errors on NvSwitch 2 link 7"])}}), {}
    )
    assert (found.gpu, found.system, found.code) == ("", "Switch 2 NVLINK", "NVSWITCH_FATAL_ERROR")


def test_health_is_queried_seldom_and_its_incidents_are_repeated_in_between(metrics: Exporter, replies: Path) -> None:
    (replies / "health").write_text(report(GPU={"1": {"PCIe system": ("Warning", ["x"])}}))
    metrics.text = page(GPUS, f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{labels(1, OTHER)} 0.5")
    reader = DcgmReader(ReaderOptions(dcgm_user=ME, exporter=metrics.url, dcgmi=FAKE))
    runs = set()
    for _ in range(3):
        data = reader.read()
        assert [(incident.gpu, incident.system) for incident in data.incidents] == [(OTHER, "PCIe")]
        assert data.unread == {}
        runs.add(data.health_at)
    assert len(runs - {None}) == 1, "three reads must report the time of the only run of dcgmi"
    assert (replies / "calls").read_text() == "health -c -j\n"


@pytest.mark.parametrize(
    "text", ["Error: Health watches not enabled. Please enable watches. ", "", "{}", "[1", '{"body": 3}']
)
def test_invalid_output_of_dcgmi_health_is_rejected(text: str) -> None:
    with pytest.raises(NotUnderstood):
        health(text, {})


def test_unreachable_host_engine_is_unread_with_the_message_of_dcgmi(metrics: Exporter, replies: Path) -> None:
    why = read(metrics, FAKE).unread["health"]
    assert why == "health -c: Error: unable to establish a connection to the specified host: localhost"


@pytest.mark.parametrize("how", ["", "deaf"])
def test_hung_dcgmi_gets_sigterm_before_sigkill(
    metrics: Exporter, replies: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(dcgm, "_HEALTH_TIMEOUT_S", 1.0)
    monkeypatch.setattr(dcgm, "TERM_TIMEOUT_S", 1.0)
    (replies / "hang").write_text(how)
    assert read(metrics, FAKE).unread["health"] == "fake_dcgmi: no answer within 1 s"
    assert (replies / "signals").read_text() == "SIGTERM\n"


_READS = """
import sys
from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.dcgm import reader as dcgm
from rrl.health.readers.dcgm.reader import DcgmReader
dcgm.HOSTENGINE_PORT = int(sys.argv[3])
DcgmReader(ReaderOptions(dcgm_user=sys.argv[2], exporter="http://127.0.0.1:1/", dcgmi=sys.argv[1])).read()
"""


def test_dcgmi_gets_sigterm_when_its_reader_is_killed(replies: Path, hostengine: int) -> None:
    (replies / "hang").touch()
    with subprocess.Popen([sys.executable, "-c", _READS, FAKE, ME, str(hostengine)]) as reader:
        _until(lambda: (replies / "calls").exists())
        os.kill(reader.pid, signal.SIGKILL)
    signals = replies / "signals"
    _until(lambda: signals.exists() and signals.read_text())
    assert signals.read_text() == "SIGTERM\n"


def _until(done: Any) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ── dcgmi diag ───────────────────────────────────────────────────────────────────────────────────────────────────────
PERSISTENCE = {
    "error_category": 8,
    "error_id": 29,
    "error_severity": 5,
    "warning": 'Persistence Mode: Persistence mode for GPU 0 is disabled. Enable it by running "nvidia-smi -pm 1".',
}


def document(name: str, *results: dict[str, Any], top: str = "DCGM Diagnostic") -> str:
    """Return a document in the form of DCGM 4.2.3."""
    test = {"name": name, "results": results, "test_summary": {"status": "Fail"}}
    return json.dumps(
        {
            top: {"test_categories": [{"category": "Deployment", "tests": [test]}]},
            "entity_groups": [{"entity_group": "GPU", "entity_group_id": 1, "entities": [{"entity_id": 0}]}],
            "metadata": {"Driver Version Detected": "580.82.09", "version": "4.2.3"},
        }
    )


def test_failed_test_of_dcgm_4_has_its_code() -> None:
    memory = {"error_id": 52, "error_severity": 2, "warning": "Found 3 faulty memory elements on GPU 1"}
    text = document(
        "memory",
        {"entity_group": "GPU", "entity_id": 0, "status": "Pass"},
        {"entity_group": "GPU", "entity_id": 1, "status": "Fail", "warnings": [memory]},
    )
    assert diag(text, {"1": OTHER}) == (
        DcgmIncident(OTHER, "memory", "FAULTY_MEMORY", "fail", "Found 3 faulty memory elements on GPU 1", "diag"),
    )


def test_persistence_mode_reported_by_diag_is_a_warning() -> None:
    (found,) = diag(
        document("software", {"entity_group": "GPU", "entity_id": 0, "status": "Fail", "warnings": [PERSISTENCE]}), {}
    )
    assert (found.code, found.severity, found.gpu) == ("PERSISTENCE_MODE", "warn", "0")


def test_failed_test_of_dcgm_3_is_reported_for_each_gpu() -> None:
    text = "Successfully ran diagnostic for group.\n" + document(
        "PCIe",
        {"gpu_ids": "0,1", "status": "Fail", "warnings": [{"warning": "more than 8 PCIe replays per minute"}]},
        top="DCGM GPU Diagnostic",
    )
    assert [(found.gpu, found.code) for found in diag(text, {})] == [("0", "PCI_REPLAY_RATE"), ("1", "PCI_REPLAY_RATE")]


def test_dcgm_test_that_failed_without_a_message_is_a_failure() -> None:
    (found,) = diag(document("memory", {"entity_group": "GPU", "entity_id": 0, "status": "Fail"}), {})
    assert (found.severity, found.text) == ("fail", "failed")


def test_a_diagnostic_that_could_not_run_is_unread_with_its_reason(metrics: Exporter, replies: Path) -> None:
    (replies / "diag").write_text(json.dumps({"DCGM Diagnostic": {"runtime_error": "another diagnostic is running"}}))
    (replies / "health").write_text(report())
    assert read(metrics, FAKE, diag=True).unread == {"diag": "diag -r: another diagnostic is running"}


def test_diagnostic_runs_once_and_only_on_request(metrics: Exporter, replies: Path) -> None:
    (replies / "health").write_text(report())
    failed = {"entity_group": "GPU", "entity_id": 0, "status": "Fail", "warnings": [PERSISTENCE]}
    (replies / "diag").write_text(document("software", failed))
    assert read(metrics, FAKE).incidents == ()
    assert (replies / "calls").read_text() == "health -c -j\n"
    reader = DcgmReader(ReaderOptions(dcgm_user=ME, exporter=metrics.url, dcgmi=FAKE, diag=True))
    assert reader.timeout_s > dcgm._DIAG_TIMEOUT_S
    for _ in range(2):
        assert [(found.source, found.system) for found in reader.read().incidents] == [("diag", "software")]
    assert (replies / "calls").read_text().splitlines()[1:] == ["health -c -j", "diag -r 1 -j"]


# ── trusted processes ────────────────────────────────────────────────────────────────────────────────────────────────
def test_gpus_of_the_driver_are_listed(metrics: Exporter, tmp_path: Path) -> None:
    (tmp_path / "net").symlink_to("/proc/net")
    for address, uuid in (("0000:1b:00.0", "GPU-0a-1"), ("0000:2b:00.0", "GPU-????-????")):
        (tmp_path / "driver/nvidia/gpus" / address).mkdir(parents=True)
        (tmp_path / "driver/nvidia/gpus" / address / "information").write_text(
            f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 17\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
        )
    assert read(metrics, proc=str(tmp_path)).driver_gpus == ("GPU-0a-1",)


def test_unknown_dcgm_user_is_named_in_the_reason(metrics: Exporter) -> None:
    reader = DcgmReader(ReaderOptions(dcgm_user="nobody-of-that-name", exporter=metrics.url, dcgmi=FAKE))
    replies = reader.read().unread
    assert "there is no such user" in replies["exporter"]
    assert "there is no such user" in replies["health"]


def test_dcgmi_is_not_run_where_no_host_engine_listens(
    metrics: Exporter, replies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcgm, "HOSTENGINE_PORT", 1)
    assert "no process listens on port 1" in read(metrics, FAKE).unread["health"]
    assert not (replies / "calls").exists()


def test_dcgmi_that_everybody_may_replace_is_not_run(metrics: Exporter, replies: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy(FAKE, folder / "dcgmi")
    folder.chmod(0o777)
    assert "is writable by every user" in read(metrics, str(folder / "dcgmi")).unread["health"]
    folder.chmod(0o755)
    (folder / "dcgmi").chmod(0o757)
    assert "is writable by every user" in read(metrics, str(folder / "dcgmi")).unread["health"]
    assert not (replies / "calls").exists()
