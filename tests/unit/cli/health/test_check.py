"""``rrl health check``: its output, and the meaning of its exit codes for a prolog."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.cli.health import check_outputs
from rrl.cli.health.check import _job_gpus
from rrl.cli.views.checks import headline, health_check_view
from rrl.config.health_rules import Expect, Rules
from rrl.config.health_rules_file import CONFIG_ENV
from rrl.core.run_dir import HISTORY_ENV
from rrl.core.types import NodeName, Verdict
from rrl.health.check_memory import FOLDER_ENV
from rrl.health.checks.evaluate import CHECKS
from rrl.health.checks.node_state import ALL_GPUS
from rrl.health.node_check import check_node, mount_timeout_s, overall
from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.samples import GpuProcess, HostData, NvmlData, Reading
from rrl.tests.support.cli.json_keys import assert_fits_its_schema
from rrl.tests.support.cli.text_snapshots import drawn, matches_stored
from rrl.tests.support.health.simulated_node import ObservedNode, gpu, host
from rrl.tests.support.mounts import can_hang, own_mounts
from rrl.tests.support.nvml.driver import FakeDriver

EXAMPLES = Path(__file__).parents[4] / "examples/health"
MOUNTS = ["health", "check", "--checks", "mounts,clock_source,readers,gpu_count"]


@pytest.fixture(autouse=True)
def _no_rules_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tmp_path / "empty.toml"
    rules.write_text("")
    monkeypatch.setenv(CONFIG_ENV, str(rules))


def rules(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return ["--config", str(path)]


# ── exit codes ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_healthy_node_without_gpus_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(MOUNTS) == 0
    assert capsys.readouterr().out.startswith("OK ")


@pytest.mark.parametrize(
    ("text", "code", "in_prolog"),
    [
        ('[expect]\nmounts = ["/no/such"]', 2, 2),
        ('[expect]\nclock_source = "sundial"', 1, 0),
        ('[expect]\nreaders = ["nvml"]\ngpus = 8', 3, 0),
    ],
)
def test_each_verdict_has_its_exit_code_and_a_prolog_fails_for_fail_only(
    tmp_path: Path, text: str, code: int, in_prolog: int
) -> None:
    where = rules(tmp_path, text)
    assert main.run([*MOUNTS, *where]) == code
    assert main.run([*MOUNTS, *where, "--prolog"]) == in_prolog


@pytest.mark.parametrize(
    "wrong",
    [
        ["--bogus"],
        ["--within", "soon"],
        ["--within", "0s"],
        ["--checks", "gpu_cout"],
        ["--checks", ","],
        ["--config", "/no/such.toml"],
        ["too", "many"],
    ],
)
def test_check_called_wrongly_prints_one_line_and_fails_no_node(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["health", "check", *wrong]) == 3
    reported = capsys.readouterr().err
    assert main.run(["health", "check", "--prolog", *wrong]) == 0
    assert reported.startswith("rrl: ")
    assert reported.count("\n") == 1


def test_a_mistake_in_the_rules_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*MOUNTS, *rules(tmp_path, "[gpu]\nhott = 1\n")]) == 3
    assert 'rules.toml:2: gpu.hott: unknown key; did you mean "hot"?' in capsys.readouterr().err
    assert main.run([*MOUNTS, *rules(tmp_path, '[checks]\ngpu_lots = "off"\n')]) == 3
    assert 'checks.gpu_lots: no such check; did you mean "gpu_lost"?' in capsys.readouterr().err


def test_check_needs_no_home_directory_and_no_run(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "rrl"
    argv = [str(program), "health", "check", "--checks", "mounts", "--prolog", "--mount", str(tmp_path / "no")]
    done = subprocess.run(argv, env={CONFIG_ENV: "/dev/null"}, cwd="/", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith(f"FAIL mounts: {tmp_path}/no: No such file or directory\n")


def test_exit_code_is_that_of_the_node_if_the_output_cannot_be_written(tmp_path: Path) -> None:
    check = f"{Path(sys.executable).parent}/rrl health check --checks mounts --prolog --mount {tmp_path}/no"
    for unheard in (">/dev/full", ">&-", "| true; exit ${PIPESTATUS[0]}"):
        done = subprocess.run(["bash", "-c", f"{check} {unheard}"], env={CONFIG_ENV: "/dev/null"}, timeout=60)
        assert done.returncode == 2, unheard


if can_hang():  # defined only where a mount can hang, because CI counts a skipped test as a failure

    def test_a_mount_that_hangs_fails_within_the_time_of_one_check(tmp_path: Path) -> None:
        """The mount is a real file system whose server does not answer.

        All time limits are shorter than the default ones, by the same factor.
        """
        hung, where = tmp_path / "hung", rules(tmp_path, "[host]\nmount_hung = 3.0")
        hung.mkdir()
        check = [f"{Path(sys.executable).parent}/rrl", "health", "check", "--prolog", "--within", "9s", *where]
        argv = [
            *own_mounts(),
            sys.executable,
            "-P",
            "-m",
            "rrl.tests.support.mounts",
            str(hung),
            *check,
            "--checks",
            "mounts",
            "--mount",
            str(hung),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done
        assert done.stdout.startswith(f"FAIL mounts: {hung}: did not answer within 3 s")


def test_timeouts_of_the_shipped_hooks_suffice_to_detect_a_hung_mount() -> None:
    for name in ("prolog.sh", "epilog.sh", "healthcheck.sh"):
        (within,) = re.findall(r"health check .*--within (\d+)s", (EXAMPLES / name).read_text())
        assert mount_timeout_s(Rules(), float(within)) == Rules().host.mount_hung


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_json_output_has_the_verdict_and_every_finding_in_wall_clock_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*MOUNTS, "--mount", "/no/such", "--json"]) == 2
    reported = json.loads(capsys.readouterr().out)
    assert_fits_its_schema("health-check", reported)
    assert (reported["verdict"], reported["code"]) == ("FAIL", 2)
    (failed,) = [one for one in reported["findings"] if one["verdict"] == "FAIL"]
    assert (failed["detector"], failed["component"], failed["cause"]) == ("mounts", "/no/such", "storage")
    assert 0 <= reported["checked_at"] - failed["since"] < 600


def ill() -> ObservedNode:
    node = ObservedNode(Rules(expect=Expect(gpus=2)))
    node.reads(host(mounts=()), times=3)
    node.gpus(gpu(1, recovery_action="gpu_reset", temperature=90), times=3).xid(79, index=1)
    return node.cannot("dcgm", "absent", "dcgmi is not installed").cannot("fabric", "broken", "OSError: x")


def test_most_severe_finding_is_listed_first() -> None:
    matches_stored("health_check_80", drawn(health_check_view(ill().found), 80))


def test_first_line_is_usable_as_a_drain_reason() -> None:
    found = ill().found
    assert headline(overall(found), found) == "FAIL gpu_recovery_action: GPU 1: the driver requires: gpu reset"


# ── check of one node ────────────────────────────────────────────────────────────────────────────────────────────────
class Scripted:
    """A replacement for the readers that returns the given answers in turn, and then repeats the last one."""

    def __init__(self, *answers: HostData | NvmlData) -> None:
        self.answers, self.requests = list(answers), 0

    def __call__(self, readers: object, timeout_s: float, options: ReaderOptions) -> list[Reading]:
        data = self.answers[min(self.requests, len(self.answers) - 1)]
        self.requests += 1
        return [Reading("nvml" if isinstance(data, NvmlData) else "host", float(self.requests), data)]


@pytest.fixture
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.health.node_check.RECHECK_INTERVAL_S", 0.0)


def dead() -> HostData:
    mount = host().mounts[0]
    return host(mounts=(type(mount)(path="/", answers=False, why="did not answer"),))


@pytest.mark.usefixtures("_no_pause")
def test_finding_without_proof_is_confirmed_before_it_fails_a_node() -> None:
    read = Scripted(dead())
    assert overall(check_node(Rules(), 5, only=["mounts"], read=read)) is Verdict.FAIL
    assert read.requests == 3


@pytest.mark.usefixtures("_no_pause")
def test_finding_not_confirmed_fails_no_node_and_a_healthy_one_is_read_once() -> None:
    read = Scripted(dead(), host())
    assert overall(check_node(Rules(), 5, only=["mounts"], read=read)) is Verdict.WARN
    assert read.requests == 2
    healthy = Scripted(host())
    assert overall(check_node(Rules(), 5, only=["mounts"], read=healthy)) is Verdict.OK
    assert healthy.requests == 1


def test_without_time_for_a_second_reading_the_finding_stays_a_warning() -> None:
    read = Scripted(dead())
    assert overall(check_node(Rules(), 0.5, only=["mounts"], read=read)) is Verdict.WARN
    assert read.requests == 1


@pytest.mark.usefixtures("_no_pause")
def test_gpus_of_the_job_must_be_free_before_it_starts() -> None:
    used = NvmlData(driver="570", gpus=(gpu(0), gpu(1, processes=(GpuProcess(7, 0, None),), memory_used=2**32)))
    for vacant, verdict in (((), Verdict.OK), (["0"], Verdict.OK), (["1"], Verdict.FAIL), ([ALL_GPUS], Verdict.FAIL)):
        found = check_node(Rules(), 5, expected_free=vacant, only=["gpu_memory", "gpu_processes"], read=Scripted(used))
        assert overall(found) is verdict


def test_gpus_of_the_job_are_read_from_the_prolog_environment() -> None:
    assert _job_gpus("") == ()
    assert _job_gpus("0,2-4") == ("0", "2", "3", "4")
    assert _job_gpus("GPU-abc") is None


# ── memory, history and metrics ──────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "state"))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return tmp_path / "state"


def only_mounts(tmp_path: Path, mount: str = "/") -> list[str]:
    off = "\n".join(f'{one.name} = "off"' for one in CHECKS if one.name != "mounts")
    return rules(tmp_path, f'[expect]\nmounts = ["{mount}"]\n[checks]\n{off}\n')


def test_prolog_checks_nothing_where_a_full_check_is_fresh(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = only_mounts(tmp_path)
    prolog = ["health", "check", "--prolog", "--fresh", "30min", *where]
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    assert main.run(["health", "check", "--epilog", "--remember", *where]) == 0
    capsys.readouterr()
    where[1] = only_mounts(tmp_path, "/no/such")[1]
    assert main.run(prolog) == 0
    assert capsys.readouterr().out.startswith("OK passed a full check ")
    assert main.run(prolog) == 2, "the second prolog did not fail, though the first job has the GPUs"
    monkeypatch.setenv("SLURM_JOB_GPUS", "")
    assert main.run(prolog) == 2, "the prolog did not fail after a failed check"


def test_findings_are_recorded_in_the_history_once_and_metrics_written(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history, metrics = tmp_path / "history", tmp_path / "rrl.prom"
    history.mkdir()
    check = [
        "health",
        "check",
        *only_mounts(tmp_path, str(tmp_path / "scratch")),
        "--record",
        "--history",
        str(history),
        "--prometheus",
        str(metrics),
    ]
    assert (main.run(check), main.run(check)) == (2, 2)
    assert 'rrl_node_check_verdict{node="n1",verdict="FAIL"} 1.0' in metrics.read_text()
    (tmp_path / "scratch").mkdir()
    assert main.run(check) == 0
    assert "not " not in capsys.readouterr().out.replace("not found", "")
    (path,) = history.rglob("health-check.n1.*.jsonl")
    recorded = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one.get("verdict", one["kind"]) for one in recorded] == ["node_checks", "FAIL", "OK"]
    assert recorded[1]["since"] == pytest.approx(recorded[1]["at"], abs=600), "the times are not in seconds since 1970"


def test_history_and_metrics_that_cannot_be_written_change_no_verdict(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = only_mounts(tmp_path, "/no/such")
    no = ["--record", "--history", str(tmp_path / "no"), "--prometheus", str(tmp_path / "no/rrl.prom")]
    assert main.run(["health", "check", "--prolog", *where, *no]) == 2
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("FAIL mounts: /no/such")
    assert [line.split(":")[0] for line in shown[-2:]] == ["not written", "not recorded"]
    assert main.run(["health", "check", "--json", *where, *no]) == 2
    output = capsys.readouterr()
    assert json.loads(output.out)["verdict"] == "FAIL"
    assert output.err.count("not ") == 2


def test_history_on_storage_that_hangs_does_not_hold_the_check_up(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_outputs, "RECORD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(check_outputs, "record_findings", lambda *_: time.sleep(600))
    problem = check_outputs.record(tmp_path, NodeName("n1"), [])
    assert problem == f"not recorded: {tmp_path}: no answer within 0.2 s"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--record"], "--record: name the site's history with --history DIR or RRL_HISTORY"),
        (["--prometheus", "rrl.txt"], "--prometheus: rrl.txt: node_exporter reads only files that end in .prom"),
        (["--fresh", "2d"], "--fresh"),
    ],
)
def test_wrong_outputs_are_refused_in_one_line(
    wrong: list[str], message: str, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(HISTORY_ENV, raising=False)
    assert main.run([*MOUNTS, *wrong]) == 3
    assert capsys.readouterr().err.startswith(f"rrl: {message}")
    assert main.run([*MOUNTS, *wrong, "--epilog"]) == 0


# ── nvidia-ml-py against the fake driver ─────────────────────────────────────────────────────────────────────────────
def test_driver_that_requests_a_reset_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(tmp_path).gpus(8)
    for name, value in driver.env().items():
        monkeypatch.setenv(name, value)
    command = ["health", "check", "--checks", "gpu_count,gpu_recovery_action,gpu_ecc_uncorrected"]
    assert main.run([*command, *rules(tmp_path, "[expect]\ngpus = 8\n")]) == 0
    assert main.run([*command, *rules(tmp_path, "[expect]\ngpus = 9\n"), "--prolog"]) == 2
    driver.set(3, "recovery_action", "node_reboot")
    assert main.run([*command, "--prolog"]) == 2
