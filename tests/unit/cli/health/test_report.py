"""``rrl health report`` and ``rrl health drain-requests``: their output, and the evidence that they accept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rrl.cli import main
from rrl.cli.health import node_drains
from rrl.cli.health import report as health_report
from rrl.cli.views.checks import requests_view
from rrl.cli.views.health.health_page import chart, page
from rrl.cli.views.health.health_report import figure, interval, report_view, to_paste
from rrl.cluster.base import Unanswered
from rrl.config.health_rules_file import CONFIG_ENV
from rrl.core.run_dir import HISTORY_ENV
from rrl.health.checks.evaluate import CHECKS
from rrl.health.history import cache as history_cache
from rrl.health.history.cache import Sources
from rrl.health.history.own_folder import user_name
from rrl.health.history.rates import DAY_S, mtbf
from rrl.health.report.drain_requests import open_requests
from rrl.health.report.model import Day, DrainState, Report
from rrl.health.report.site import report
from rrl.tests.support.cli.json_keys import assert_fits_its_schema
from rrl.tests.support.cli.text_snapshots import drawn, matches_stored
from rrl.tests.support.cli.waiting import eventually
from rrl.tests.support.health.site_history import ANNA, BEGAN, acted, began, found, held, sourced, week, write
from rrl.tests.support.slurm.lab import SlurmLab

NOW = BEGAN + 7 * DAY_S
SOURCES = Sources(3, 46, 2, ("/history/eve/x.000001.jsonl: it belongs to mallory, not to eve",))
FOREIGN = DrainState("IDLE+DRAIN", True, "foreign", "fan is loud", "root@2027-01-15T08:00:00")
OURS = DrainState("MIXED+DRAIN", True, "rrl", "rrl:math-1: gpu: Xid 48", "slurm@2027-01-15T08:00:00")
ME = user_name()


def made(**drains: DrainState) -> Report:
    return report(week(), BEGAN, NOW, drains)


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_table_of_the_report_equals_the_snapshot() -> None:
    drains = {"n3": DrainState("IDLE"), "n7": FOREIGN, "n5": OURS}
    whole = made(**drains)
    matches_stored("health_report", drawn(report_view(whole, SOURCES, ""), 100) + to_paste(whole))


def test_site_without_failures_is_reported_in_a_few_lines() -> None:
    quiet = report(
        sourced(ANNA, "r", began(0, "r", ANNA), held(0, *(f"n{i}" for i in range(1, 65))), began(DAY_S, "r", ANNA, 2)),
        BEGAN,
        NOW,
    )
    shown = drawn(report_view(quiet, Sources(1, 65, 0, ()), "scontrol cannot be started"), 100)
    matches_stored("health_report_quiet", shown)


def test_requested_drains_are_shown_with_the_user_who_requested_them() -> None:
    requests = open_requests(
        [*week(), *sourced(ANNA, "s", acted(DAY_S, "n9", "drain_requested", by="anna: fan", cause=""))]
    )
    shown = drawn(requests_view(requests, {"n9": FOREIGN}, "", NOW), 100)
    matches_stored("health_drains", shown)


@pytest.mark.parametrize(
    ("failures", "expected_text"),
    [(4, "200 h (95 %: 78.1 to 734)"), (0, "more than 217 h (95 % confidence; no failure was seen)")],
)
def test_mean_is_reported_with_its_interval(failures: int, expected_text: str) -> None:
    assert interval(mtbf(failures, 800.0), " h") == expected_text


# ── HTML ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Page(HTMLParser):
    """Parses a page: its elements, whether each is closed, and every reference that a browser would load or run."""

    VOID = ("meta", "rect", "line", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.visible: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.visible.append(tag)
        fetching = ("src", "href", "action", "data", "xlink:href")
        fetched = [(name, value) for name, value in attributes if name in fetching or name.startswith("on")]
        self.references += [f"{name}={value}" for name, value in fetched]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize(
    ("value", "expected_text"),
    [
        (0.0, "0"),
        (0.00286, "0.00286"),
        (3.214, "3.21"),
        (47.0, "47.0"),
        (106.38, "106"),
        (217444.6, "217,000"),
        (1e-5, "1e-05"),
    ],
)
def test_figures_are_rounded_to_significant_digits(value: float, expected_text: str) -> None:
    assert figure(value) == expected_text


def test_html_page_is_self_contained_and_has_plots() -> None:
    text = page(made(n7=FOREIGN), SOURCES, "")
    read = Page(text)
    assert read.open == []
    assert read.references == []
    assert not {"script", "link", "img", "iframe", "object"} & set(read.visible)
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert read.visible.count("svg") == 1 + 5  # a plot, and a bar for each cause
    assert read.visible.count("rect") > 10
    for word in ("n3", "106 (95 %: 34.5 to 248)", "fan is loud", "1650924012345", "state=drain"):
        assert word in " ".join(read.text)


def test_text_of_users_is_escaped() -> None:
    evil = '</code><script>alert("x")</script><img src=http://evil onerror=alert(1)>'
    records = [
        began(0, "r", ANNA),
        *held(0, "n1"),
        found(5, "n1", text=evil, component=evil),
        acted(6, "n1", "drain_requested", reason=f"rrl:{evil}", outcome=evil, by=evil),
    ]
    read = Page(page(report(sourced(ANNA, evil, records), BEGAN, NOW), Sources(1, 1, 0, (evil,)), evil))
    assert not {"script", "img"} & set(read.visible)
    assert read.references == []
    assert evil in "".join(read.text)


def test_bar_heights_are_proportional_and_within_the_chart() -> None:
    days = [Day(BEGAN + i * DAY_S, 1.0, {"gpu": i, "node": 2 * i} if i else {}) for i in range(40)]
    drawn_chart = chart(days)
    heights = [bar["height"] for bar in drawn_chart["bars"]]
    assert heights[3] == pytest.approx(2 * heights[2], abs=0.2)
    assert all(bar["y"] >= 0 and bar["x"] + bar["width"] <= drawn_chart["width"] for bar in drawn_chart["bars"])
    assert len(drawn_chart["labels"]) <= 10
    assert chart([])["bars"] == []


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a history of this user with a week of runs. The states of drains come from no cluster."""
    folder = tmp_path / "history"
    folder.mkdir()
    by_run: dict[str, list[Any]] = {}
    for one in week():
        by_run.setdefault(one.run, []).append(one.record)
    for run, records in by_run.items():
        write(folder, ME, run, [began(0, run, ME), *records[1:]])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(HISTORY_ENV, raising=False)
    monkeypatch.setattr(health_report, "_now", lambda: NOW)
    monkeypatch.setattr(history_cache, "TRUSTED_UIDS", {os.geteuid()})
    monkeypatch.setattr(node_drains, "drain_states", lambda nodes: {node: DrainState("IDLE") for node in nodes})
    return folder


SINCE = ["--since", "2020-01-01"]


def test_the_table_is_printed_with_lines_to_paste(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["health", "report", "--history", str(history), *SINCE]) == 0
    shown = capsys.readouterr().out
    assert "5 of infrastructure" in shown
    assert "\nscontrol update nodename=n3 state=drain reason='rrl:math-1: gpu: Xid 48: double-bit ECC error'\n" in shown


def test_json_report_has_stable_names(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["health", "report", "--history", str(history), "--format", "json", *SINCE]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert set(reported) == {"schema", "report", "sources", "drains_unknown"}
    assert_fits_its_schema("health-report", reported)
    assert set(reported["report"]) == {"version", "site", "nodes"}
    matches_stored("health_report_names", "".join(f"{name}\n" for name in sorted(names(reported))))


def test_history_of_an_old_schema_is_reported_as_not_read(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = history / ME / "old.000001.jsonl"
    old.write_text(
        f'{{"kind":"began","at":{BEGAN},"run":"old","user":"{ME}","cluster":"lab","job":"math","schema":1}}\n'
    )
    assert main.run(["health", "report", "--history", str(history), *SINCE]) == 0
    assert f"rrl: not read: {old}: it has history schema 1; " in capsys.readouterr().err.replace("\n", " ")


def names(value: Any, before: str = "") -> set[str]:
    """Return the path of every key in a document. The entries of a list share one path."""
    if isinstance(value, dict) and before.rpartition(".")[2] not in ("facts", "failures"):
        return {name for key, one in value.items() for name in names(one, f"{before}.{key}" if before else key)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {name for one in value for name in names(one, f"{before}[]")}
    return {before}


def test_report_of_one_node_shows_it_alone(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main.run(["health", "report", "--history", str(history), "--node", "n[3,5]", "--format", "json", *SINCE]) == 0
    )
    reported = json.loads(capsys.readouterr().out)["report"]
    assert [one["node"] for one in reported["nodes"]] == ["n3", "n5"]
    assert reported["site"]["failures"] == 3


def test_a_page_is_written_to_a_file_that_others_may_read(history: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    command = ["health", "report", "--history", str(history), "--format", "html", "--output", str(out), *SINCE]
    assert main.run(command) == 0
    assert Page(out.read_text()).open == []
    assert out.stat().st_mode & 0o777 == 0o644


def test_history_folder_is_found_by_the_environment_variable_of_the_site(
    history: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(HISTORY_ENV, str(history))
    assert main.run(["health", "report", *SINCE]) == 0
    assert "n3" in capsys.readouterr().out


def test_report_says_if_no_cluster_answers(
    history: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(nodes: list[str]) -> dict[str, DrainState]:
        raise Unanswered("scontrol: no answer within 10 s")

    monkeypatch.setattr(node_drains, "drain_states", silent)
    assert main.run(["health", "report", "--history", str(history), *SINCE]) == 0
    assert "drains are unknown: scontrol: no answer within 10 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["report"], "no history folder is named"),
        (["drain-requests"], "no history folder is named"),
        (
            ["report", "--history", "/nowhere"],
            "/nowhere: no such folder; name the folder in which the runs of this site record their history",
        ),
        (["report", "--history", "HERE", "--since", "yore"], '--since "yore" is not a time'),
        (["report", "--history", "HERE", "--since", "2099-01-01"], '--since "2099-01-01" is not in the past'),
        (["report", "--history", "HERE", "--since", "0d"], '--since "0d" is not in the past'),
        (
            ["report", "--history", "HERE", "--format", "pdf"],
            '--format "pdf" does not exist; the formats are table, json, html',
        ),
        (["report", "--history", "HERE", "--node", "n[1-"], "names no nodes"),
        (["report", "--history", "HERE", "--node", "n[1-999999999]"], "names no nodes"),
        (["report", "--history", "HERE", "--node", "r[1-9999]n[1-9999]"], "names no nodes"),
        (["report", "--history", "HERE", "--node", ""], "names no nodes"),
    ],
)
def test_invalid_request_is_one_line(
    history: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected_text: str
) -> None:
    assert main.run(["health", *(str(history) if word == "HERE" else word for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected_text in err
    assert err.count("\n") == 1


def test_node_that_no_run_had_is_reported_unknown(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["health", "report", "--history", str(history), "--node", "n3,n[98-99]", *SINCE]) == 0
    out, err = capsys.readouterr()
    assert err == "rrl: nothing is known about n[98-99]: no run used them in this time\n"
    assert "1 node of lab" in out


def test_since_7d_covers_seven_days(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["health", "report", "--history", str(history), "--since", "7d"]) == 0
    assert "(7d00h)" in capsys.readouterr().out


def test_rejected_records_are_reported(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(history, "nosuchuser", "r", [began(0, "r", "nosuchuser")])
    assert main.run(["health", "report", "--history", str(history), *SINCE]) == 0
    assert "not read:" in capsys.readouterr().err


def test_requests_are_listed_as_lines_to_paste(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["health", "drain-requests", "--history", str(history), *SINCE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("n3  gpu")
    assert lines[-1].startswith("scontrol update nodename=n3 state=drain reason=")
    assert main.run(["health", "drain-requests", "--history", str(history), "--json", *SINCE]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert_fits_its_schema("drain-requests", one)
    assert (one["node"], one["users"], one["drained"]) == ("n3", [ME], False)


def test_a_node_that_was_booted_since_is_not_drained_again(
    history: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        node_drains, "drain_states", lambda nodes: {one: DrainState("IDLE", booted=2e9) for one in nodes}
    )
    common = ["health", "drain-requests", "--history", str(history), *SINCE]
    assert main.run(common) == 0
    shown = capsys.readouterr().out
    assert "after the drain was requested" in shown
    assert "scontrol" not in shown
    assert main.run([*common, "--apply"]) == 0
    assert capsys.readouterr().out == "n3: was booted after the drain was requested: not drained\n"


def test_help_and_usage_errors_import_no_heavy_package() -> None:
    code = (
        "import sys; from rrl.cli.main import run; run(['health', '--help']); "
        "print(*sorted({n.partition('.')[0] for n in sys.modules} & {'sqlite3', 'jinja2', 'prometheus_client', 'torch',"
        " 'zmq', 'ClusterShell'}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "drain-requests" in done.stdout
    assert done.stderr.strip() == ""


# ── a real Slurm ─────────────────────────────────────────────────────────────────────────────────────────────────────
def command(lab: SlurmLab, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``rrl health`` as the administrator of the Slurm cluster, who is the user of these tests."""
    rrl = str(Path(sys.executable).parent / "rrl")
    env = {**os.environ, **lab.environment(), "XDG_CACHE_HOME": str(cache)}
    env["PATH"] = f"{lab.environment()['PATH']}:{os.environ['PATH']}"
    return subprocess.run([rrl, "health", *arguments], env=env, capture_output=True, text=True, timeout=120)


def request_drains(folder: Path, *nodes: str, cause: str = "storage") -> None:
    """Write drain requests of this user's runs for these nodes.

    They are new, because a request from before a node's boot does not count.
    """
    reason, at = "rrl:math-1: storage: it's gone", time.time() - BEGAN
    records = [acted(at + i, node, "drain_requested", reason=reason, cause=cause) for i, node in enumerate(nodes)]
    write(folder, ME, "math-1", [began(at, "math-1", ME), *records])


@pytest.fixture
def broken_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set rules by which a mount is missing on every node, and return the reason of a drain for this failure."""
    rules = tmp_path / "health.toml"
    others = "".join(f'{check.name} = "off"\n' for check in CHECKS if check.name != "mounts")  # this machine's own ills
    rules.write_text(f'[expect]\nmounts = ["/nonexistent"]\n[checks]\n{others}')
    monkeypatch.setenv(CONFIG_ENV, str(rules))
    return "rrl:math-1: storage: /nonexistent"


def reason_of(lab: SlurmLab, node: str) -> str:
    return lab.slurm("sinfo", "-h", "-n", node, "-o", "%T %E").strip()


def test_administrator_can_carry_out_drain_requests(slurm_lab: SlurmLab, tmp_path: Path, broken_mount: str) -> None:
    lab, folder = slurm_lab, tmp_path / "history"
    folder.mkdir()
    lab.clear()
    request_drains(folder, "n2", "n3", "n99")
    common = ("--history", str(folder), *SINCE)
    lab.slurm("scontrol", "update", "nodename=n3", "state=drain", "reason=fan is loud")
    try:
        shown = command(lab, tmp_path, "drain-requests", *common)
        assert shown.returncode == 0, shown.stderr
        assert "foreign: fan is loud" in shown.stdout
        assert "nodename=n3 " not in shown.stdout
        done = command(lab, tmp_path, "drain-requests", "--apply", *common)
        assert done.returncode == 1  # n99 is not a node
        lines = done.stdout.splitlines()
        assert lines[0] == "n3: is drained already: fan is loud"
        assert "n99: not drained: rrl health check could not run there: not known to Slurm" in lines
        # the reason is the failure that the check found, not the one in the request
        assert reason_of(lab, "n2").startswith(f"drained {broken_mount}")
        assert reason_of(lab, "n3") == "drained fan is loud"
        reported = json.loads(command(lab, tmp_path, "report", "--format", "json", *common).stdout)["report"]["nodes"]
        assert {one["node"]: one["drain"]["owner"] for one in reported} == {"n2": "rrl", "n3": "foreign", "n99": ""}
        request_drains(folder, "n4")
        # two of the five nodes are drained already
        again = command(lab, tmp_path, "drain-requests", "--apply", *common)
        assert again.returncode == 1
        assert "n4: not drained: 2 of 5 nodes are down or drained already" in again.stdout
        assert reason_of(lab, "n4").startswith("idle")
    finally:
        for node in ("n2", "n3", "n4"):
            lab.slurm("scontrol", "update", f"nodename={node}", "state=undrain")
        lab.clear()


def test_a_request_that_the_check_on_the_node_denies_drains_nothing(
    slurm_lab: SlurmLab, tmp_path: Path, broken_mount: str
) -> None:
    lab, folder = slurm_lab, tmp_path / "history"
    folder.mkdir()
    lab.clear()
    request_drains(
        folder, "n2", cause="fabric"
    )  # the check finds another failure than the request: a missing mount, which many nodes may have at once
    done = command(lab, tmp_path, "drain-requests", "--apply", "--history", str(folder), *SINCE)
    assert done.returncode == 1
    assert done.stdout == f"n2: not drained: rrl health check there does not confirm the records of {ME}\n"
    assert reason_of(lab, "n2").startswith("idle")


@pytest.mark.long
def test_request_for_a_node_too_busy_for_a_check_drains_nothing(
    slurm_lab: SlurmLab, tmp_path: Path, broken_mount: str
) -> None:
    lab, folder = slurm_lab, tmp_path / "history"
    folder.mkdir()
    lab.clear()
    lab.slurm("sbatch", "--exclusive", "--nodelist=n2", "--output=/dev/null", "--wrap=sleep 600")
    eventually(lambda: reason_of(lab, "n2").startswith("alloc"))
    request_drains(folder, "n2")
    try:
        done = command(lab, tmp_path, "drain-requests", "--apply", "--history", str(folder), *SINCE)
        assert done.returncode == 1
        assert done.stdout.startswith("n2: not drained: rrl health check could not run there: ")
        assert not reason_of(lab, "n2").startswith("drain")
    finally:
        lab.clear()


def test_number_of_drains_per_command_is_limited_and_a_pasted_command_drains_its_node(
    slurm_lab: SlurmLab, tmp_path: Path, broken_mount: str
) -> None:
    lab, folder = slurm_lab, tmp_path / "history"
    folder.mkdir()
    lab.clear()
    request_drains(folder, "n1", "n2")
    common = ("--history", str(folder), *SINCE)
    try:
        lines = [
            line
            for line in command(lab, tmp_path, "drain-requests", *common).stdout.splitlines()
            if line.startswith("scontrol")
        ]
        env = {**os.environ, **lab.environment()}
        subprocess.run(["bash", "-c", lines[0]], env=env, check=True, timeout=60)  # as an administrator pastes it
        assert reason_of(lab, "n1") == "drained rrl:math-1: storage: it's gone"
        lab.slurm("scontrol", "update", "nodename=n1", "state=undrain")
        done = command(lab, tmp_path, "drain-requests", "--apply", *common)
        assert done.returncode == 1
        assert "n1: drained: " in done.stdout
        assert "n2: not drained: the limit of this command is reached (1 drained)" in done.stdout
    finally:
        for node in ("n1", "n2"):
            lab.slurm("scontrol", "update", f"nodename={node}", "state=undrain")
        lab.clear()


def test_user_without_the_right_to_drain_gets_a_message(slurm_lab: SlurmLab, tmp_path: Path, broken_mount: str) -> None:
    lab = slurm_lab
    folder = lab.user_home / "history"
    rules = lab.user_home / "health.toml"
    rules.write_text(Path(os.environ[CONFIG_ENV]).read_text())
    rrl = str(Path(sys.executable).parent / "rrl")
    code = (
        "import sys, time; from pathlib import Path; from rrl.tests.support.health.site_history import *; "
        "user = sys.argv[2]; "
        "at = time.time() - BEGAN; "
        "ask = acted(at + 1, 'n2', 'drain_requested', reason='rrl:r:x', cause='storage'); "
        "write(Path(sys.argv[1]), user, 'r', [began(at, 'r', user), ask])"
    )
    folder.mkdir(exist_ok=True)
    folder.chmod(0o1777)
    lab.run_as_user([sys.executable, "-c", code, str(folder), lab.user or ME])
    apply = [rrl, "health", "drain-requests", "--apply", "--history", str(folder), *SINCE]
    done = lab.run_as_user(apply, check=False, env={CONFIG_ENV: str(rules)})
    if lab.user:  # without a plain user, the command runs as SlurmUser, who may drain
        assert done.returncode == 1
        assert "n2: not drained: this user may not drain nodes" in done.stdout
        assert reason_of(lab, "n2").startswith("idle")
