"""The metrics of a manager for Prometheus. The alerts and the dashboard use no other metrics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rrl.core.run_dir import RunDir
from rrl.core.types import Cause, Evidence, Finding, NodeName, Outcome, Remedy, ReplicaId, Verdict, Version
from rrl.health.checks.xid_events import XidEvent
from rrl.health.history.cache import HistoryCache
from rrl.health.node_metrics import NodeCheckResult
from rrl.health.node_metrics import metrics as node_metrics
from rrl.health.report.site import report
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Drain, Exclude, Why
from rrl.manager.model.reducer import fold
from rrl.manager.reporting import metrics_server
from rrl.manager.reporting.failure_timeline import FailureTimeline
from rrl.manager.reporting.metrics import MAX_FINDING_SERIES, Facts, RunCounters, samples
from rrl.manager.reporting.metrics_server import MAX_CONNECTIONS, MetricsServer
from rrl.tests.support.cli.story import BEGAN, Story, wide
from rrl.tests.support.cli.waiting import eventually
from rrl.tests.support.runs import current_incarnations, light_job, submit_here

DOCS = Path(__file__).parents[4] / "docs"
N3 = NodeName("n3")
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def tallied(story: Story) -> RunCounters:
    timeline, state = FailureTimeline(), None
    tally = RunCounters(timeline)
    for stamped in story.stamped:
        before, state = state, fold(state, stamped)
        tally.apply(before, state, stamped, timeline.apply(stamped))
    return tally


def series(story: Story, facts: Facts | None = None, tally: RunCounters | None = None) -> Series:
    families = samples(story.recorded(), tally or tallied(story), facts or Facts(story.now))
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def value(found: Series, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def works() -> Story:
    return Story("small", wide()).works()


def finding(node: str, detector: str = "xid", verdict: Verdict = Verdict.FAIL) -> Finding:
    evidence = (Evidence("kernel", "Xid 48", BEGAN),)
    return Finding(detector, verdict, Cause.GPU, Remedy.RESET_GPU, BEGAN, evidence, node=NodeName(node))


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_metrics_of_a_running_run_have_its_state_roles_and_steps() -> None:
    found = series(works(), Facts(BEGAN + 50, tokens=4096))
    assert value(found, "rrl_run_info", run="small", job="small", cluster="slurm") == 1
    assert value(found, "rrl_run_state", state="running") == 1
    assert value(found, "rrl_run_state", state="completed") == 0
    assert value(found, "rrl_replicas", role="rollout", status="joined") == 2
    assert value(found, "rrl_replicas_wanted", role="rollout") == 2
    assert value(found, "rrl_nodes", state="up") == 5
    assert (value(found, "rrl_steps_completed"), value(found, "rrl_steps_total")) == (12, 12)
    assert value(found, "rrl_tokens_generated_total") == 4096


def test_weights_of_rollouts_are_compared_with_the_newest_step_committed_or_published() -> None:
    story = Story("small", wide())
    assert not any(name == "rrl_weights_lag_steps" for name, _ in series(story))

    def has(replica: str, step: int) -> tuple[float, float]:
        story.record(ev.VersionAvailable(story.incarnation(replica), Version(step, 1)))
        found = series(story)
        return value(found, "rrl_weights_lag_steps", rollout="first"), value(
            found, "rrl_weights_lag_steps", rollout="last"
        )

    story.works()
    assert has("rollout/0", 12) == (0, 0)
    assert has("rollout/1", 9) == (0, 3)
    assert has("trainer/0", 13) == (1, 4), "a published step does not count before its commit"
    assert has("rollout/1", 13) == (0, 1)
    assert has("rollout/1", 14) == (0, 1), (
        "a rollout has a negative lag after the trainer restarted from an earlier step"
    )
    story.fences("rollout/0")
    assert has("rollout/1", 12) == (1, 1), "a fenced rollout counts as one with weights"


def test_received_weights_are_counted_over_all_incarnations_of_a_role() -> None:
    story = works()
    assert not any("weight_bytes" in name for name, _ in series(story))
    story.pulls("rollout/0", 12, 1000, 1000).pulls("rollout/0", 13, 1020, 2000).pulls("rollout/1", 13, 1000, 1000)
    story.recovers("rollout/0").pulls("rollout/0", 13, 1000, 1000, fallbacks=2)
    story.pulls("rollout/0", 13, 0, 0), story.pulls("rollout/0", 13, 10, 10)  # a faulty process
    found = series(story)
    names = ("rrl_weight_bytes_received_total", "rrl_weight_bytes_total", "rrl_delta_fallbacks_total")
    assert [value(found, name, role="rollout") for name in names] == [3030, 4010, 2]


@pytest.mark.parametrize(
    ("story", "state"),
    [(Story("small", wide()), "waiting"), (works(), "running"), (works().ends(Outcome.FAILED, "x"), "failed")],
)
def test_exactly_one_run_state_is_set(story: Story, state: str) -> None:
    by_state = {
        dict(labels)["state"]: value for (name, labels), value in series(story).items() if name == "rrl_run_state"
    }
    assert [name for name, set in by_state.items() if set] == [state]


def test_a_restart_is_counted_by_role_and_rung() -> None:
    found = series(works().wait(5).recovers("rollout/0").recovers("rollout/0"))
    assert value(found, "rrl_restarts_total", role="rollout", rung="restart in place") == 2


def test_finding_about_a_node_is_shown_until_it_is_cleared() -> None:
    story = works().record(ev.FindingChanged(finding("n3")))
    found = series(story)
    assert value(found, "rrl_findings", verdict="FAIL", detector="xid", node="n3") == 1
    assert value(found, "rrl_failures_found_total", detector="xid", cause="gpu") == 1
    story.record(ev.FindingChanged(finding("n3")), ev.FindingChanged(finding("n3", verdict=Verdict.OK)))
    found = series(story)
    assert not any(name == "rrl_findings" for name, _ in found)
    assert value(found, "rrl_failures_found_total", detector="xid", cause="gpu") == 1


def test_finding_about_a_replica_is_labelled_with_its_node() -> None:
    story = works()
    story.loses("rollout/0")
    assert value(series(story), "rrl_findings", verdict="FAIL", detector="exit_record", node="n3") == 1


def test_gpu_time_is_lost_while_a_replica_is_down() -> None:
    story = works()
    story.loses("rollout/0")
    story.fences("rollout/0")
    tally = tallied(story)
    found = series(story, Facts(story.now + 100), tally)
    assert value(found, "rrl_gpu_seconds_lost_total") == 400
    assert value(found, "rrl_replicas_down", role="rollout") == 1


def test_excluded_nodes_and_drain_requests_are_counted() -> None:
    why = Why(("xid",))
    drain = Drain(N3, "rrl:small:gpu", why)
    story = works().record(
        ev.Decided(Exclude(N3, why, Cause.GPU)), ev.Intended(drain), ev.IntentSettled(drain.tag, False, "no")
    )
    found = series(story)
    assert value(found, "rrl_nodes", state="excluded") == 1
    assert value(found, "rrl_drain_requests") == 1
    assert value(found, "rrl_exclusions_total", cause="gpu") == 1


def test_time_of_processes_is_counted_by_role_and_idle_cause_over_restarts() -> None:
    story = works().clocks("rollout/0", generate=30, wait_work=6).clocks("trainer/0", train=20, checkpoint__commits=5)
    story.recovers("rollout/0").clocks("rollout/0", generate=4)
    found = series(story)
    assert value(found, "rrl_process_seconds_total", role="rollout", cause="none") == 34
    assert value(found, "rrl_process_seconds_total", role="rollout", cause="work") == 6
    assert value(found, "rrl_idle_ratio", role="trainer", cause="commits") == 0.2
    assert not any(name == "rrl_idle_ratio" and dict(labels)["cause"] == "none" for name, labels in found)


STREAM = {
    "parts": 4.0,
    "tokens_aged_0": 50.0,
    "tokens_aged_1": 20.0,
    "length_bias": 0.98,
    "recall20": 0.75,
    "long_groups": 2.0,
}


def test_trained_tokens_are_counted() -> None:
    story = works().record(ev.StepCommitted(works().incarnation("trainer/0"), 13, {"tokens": 512.0}))
    assert value(series(story), "rrl_tokens_trained_total") == 512


def test_figures_of_a_stream_are_shown_once_a_step_has_reported_them() -> None:
    assert not any("length" in name or "parts" in name for name, _ in series(works()))
    story = works().record(ev.StepCommitted(works().incarnation("trainer/0"), 13, STREAM))
    found = series(story)
    assert value(found, "rrl_parts_per_step") == 4
    assert value(found, "rrl_tokens_trained_by_age_total", age="1") == 20
    assert value(found, "rrl_length_bias") == 0.98
    assert value(found, "rrl_length_recall") == 0.75
    assert value(found, "rrl_long_groups") == 2


def test_episodes_are_shown_in_a_run_with_agents() -> None:
    assert not any("episodes" in name or "drift" in name for name, _ in series(works()))
    counts = {
        "episodes_at_work": 5.0,
        "episodes_finished": 40.0,
        "episodes_dropped": 4.0,
        "turns": 120.0,
        "branches": 60.0,
        "given_tokens": 900.0,
        "untrained_turns": 1.0,
        "token_drift": 0.0,
    }
    found = series(works().record(ev.StepCommitted(works().incarnation("trainer/0"), 13, counts)))
    assert value(found, "rrl_episodes_at_work") == 5
    assert [value(found, "rrl_episodes_total", what=what) for what in ("finished", "replayed", "dropped")] == [40, 0, 4]
    names = ("rrl_turns_total", "rrl_branches_total", "rrl_given_tokens_total", "rrl_untrained_turns_total")
    assert [value(found, name) for name in names] == [120, 60, 900, 1]
    assert value(found, "rrl_token_drift_total") == 0


def test_ettr_is_absent_until_a_step_is_undisturbed() -> None:
    story = Story().requests_nodes().gets_nodes()
    assert not [name for name, _ in series(story) if name == "rrl_effective_time_ratio"]
    assert value(series(story.record(ev.EttrEstimated(0.875))), "rrl_effective_time_ratio") == 0.875


def test_series_of_a_thousand_findings_are_limited() -> None:
    story = works()
    for i in range(MAX_FINDING_SERIES + 300):
        story.record(ev.FindingChanged(finding(f"n{i}")))
    counts = {labels: value for (name, labels), value in series(story).items() if name == "rrl_findings"}
    assert len(counts) == MAX_FINDING_SERIES + 1
    assert sum(counts.values()) == MAX_FINDING_SERIES + 300


def test_metric_names_are_valid_in_prometheus() -> None:
    for family in samples(works().recorded(), tallied(works()), Facts(BEGAN)):
        assert re.fullmatch(r"rrl_[a-z_]+[a-z]", family.name)
        assert family.documentation.endswith(".")
        assert not family.name.endswith("_total")  # the library adds the suffix to counters
        for one in family.samples:
            assert one.name.endswith("_total") == (family.type == "counter")


# ── alerts and dashboard ─────────────────────────────────────────────────────────────────────────────────────────────
def known() -> set[str]:
    story = works().record(ev.FindingChanged(finding("n3")), ev.Decided(Exclude(N3, Why(()), Cause.GPU)))
    story.wait(1).recovers("rollout/0").clocks("trainer/0", train=9, wait_data=1).pulls("rollout/1", 12, 9, 9)
    story.record(ev.StepCommitted(story.incarnation("trainer/0"), 13, STREAM))
    story.record(ev.EttrEstimated(0.9))
    return {name for name, _ in series(story)}


def known_of_nodes() -> set[str]:
    """Return the metrics of a node's own checks, which ``rrl health check --prometheus`` writes."""
    failed = Finding("xid", Verdict.FAIL, Cause.GPU, Remedy.REBOOT, 0.0, (), node=N3)
    result = NodeCheckResult(N3, Verdict.FAIL, (failed,), (XidEvent("GPU-1", 79, 5.0),), BEGAN, 1.0, True)
    return {one.name for family in node_metrics(result) for one in family.samples}


def scraped(expr: str) -> set[str]:
    return set(re.findall(r"\brrl_[a-z_]+", expr))


def balanced(expr: str) -> bool:
    text = re.sub(r'"[^"]*"', "", expr)
    return all(text.count(a) == text.count(b) for a, b in ("()", "[]", "{}"))


def test_every_alert_is_complete_and_uses_existing_metrics() -> None:
    groups = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    for rule in rules:
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert scraped(rule["expr"])
        assert scraped(rule["expr"]) <= known() | known_of_nodes(), rule["alert"]
        assert balanced(rule["expr"])
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "1m"))


def expressions(board: Any) -> Iterator[str]:
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    yield from (one["query"]["query"] for one in board["templating"]["list"] if isinstance(one["query"], dict))


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    board = json.loads((DOCS / "grafana.json").read_text())
    shown = {name for expr in expressions(board) for name in scraped(expr)}
    assert shown <= known()
    assert known() - shown == {"rrl_run_start_time_seconds", "rrl_replicas_wanted"}
    assert all(balanced(expr) for expr in expressions(board))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_dashboard_by_node_shows_only_metrics_that_exist() -> None:
    board = json.loads((DOCS / "grafana-nodes.json").read_text())
    shown = {name for expr in expressions(board) for name in scraped(expr)}
    assert shown <= known() | known_of_nodes()
    assert shown >= known_of_nodes() | {"rrl_findings", "rrl_exclusions_total", "rrl_drain_requests"}
    assert all(balanced(expr) for expr in expressions(board))


# ── served ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "small")
    made.create()
    return made


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {one.name: one.value for family in families for one in family.samples if not one.labels}


def test_metrics_are_served_at_a_free_port_that_is_published(run: RunDir) -> None:
    story = works()
    server = MetricsServer(run, "127.0.0.1:0", lambda: samples(story.recorded(), tallied(story), Facts(story.now)))
    eventually(run.metrics.exists)
    address = run.metrics.read_text().strip()
    assert scrape(address)["rrl_steps_completed"] == 12
    server.close()
    assert not run.metrics.exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=60)


def test_idle_clients_take_few_threads_for_a_limited_time(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_TIMEOUT_S", 2.0)
    story = works()
    server = MetricsServer(run, "127.0.0.1:0", lambda: samples(story.recorded(), tallied(story), Facts(story.now)))
    eventually(run.metrics.exists)
    host, _, port = run.metrics.read_text().strip().rpartition(":")
    before = threading.active_count()
    slow = [socket.create_connection((host, int(port)), 60) for _ in range(5 * MAX_CONNECTIONS)]
    for line in slow:
        with contextlib.suppress(OSError):  # hung up on already
            line.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    for line in slow[MAX_CONNECTIONS:]:
        with contextlib.suppress(ConnectionError):
            assert line.recv(1) == b""  # hung up on at once
    assert threading.active_count() - before <= 2 * MAX_CONNECTIONS  # each has a clock
    for line in slow[:MAX_CONNECTIONS]:
        while True:  # the connection ends although the client sends a byte now and then
            try:
                line.sendall(b"x")
                line.settimeout(0.1)
                if not line.recv(1):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    eventually(lambda: threading.active_count() <= before)
    assert scrape(f"{host}:{port}")["rrl_steps_completed"] == 12
    for line in slow:
        line.close()
    server.close()


def test_scrapes_without_pause_are_served_from_the_cache(run: RunDir) -> None:
    story, made = works(), []

    def collect() -> Iterator[Any]:
        made.append(1)
        yield from samples(story.recorded(), tallied(story), Facts(story.now))

    server = MetricsServer(run, "127.0.0.1:0", collect)
    eventually(run.metrics.exists)
    since = time.monotonic()
    for _ in range(50):
        scrape(run.metrics.read_text().strip())
    assert len(made) <= 1 + (time.monotonic() - since) / metrics_server.PAGE_CACHE_S
    server.close()


def test_label_values_are_escaped() -> None:
    story = works()
    name = 'x"} 1\nrrl_steps_completed 99\n#'
    evidence = (Evidence("kernel", "x", BEGAN),)
    odd = Finding(name, Verdict.FAIL, Cause.GPU, Remedy.REBOOT, BEGAN, evidence, node=NodeName("n3"))
    story.record(ev.FindingChanged(odd))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics_server._Collector(lambda: samples(story.recorded(), tallied(story), Facts(story.now))))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    (one,) = (found for family in families if family.name == "rrl_findings" for found in family.samples)
    assert one.labels["detector"] == name
    assert [found.value for family in families if family.name == "rrl_steps_completed" for found in family.samples] == [
        12.0
    ]


@pytest.mark.parametrize("address", ["taken", "no.such.host.invalid:0", "127.0.0.1:99999"])
def test_unavailable_metrics_address_is_logged_published_and_harmless(
    run: RunDir, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}" if address == "taken" else address
        server = MetricsServer(run, at, list)
        eventually(lambda: not any(one.name == "metrics" for one in threading.enumerate()))
        server.close()
    assert caplog.text.count("metrics are not served") == 1
    assert run.metrics_failure.read_text().startswith(f"not served at {at}: ")
    assert not run.metrics.exists()
    MetricsServer(run, "127.0.0.1:0", list).close()
    eventually(lambda: not run.metrics_failure.exists())


def test_local_run_is_scraped_and_leaves_its_history(tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.mkdir()
    extra = f'[health]\nmetrics = "127.0.0.1:0"\nhistory = "{history}"'
    under_test = submit_here(tmp_path, light_job("local", 20, spares=0, warm=False, one_node=True, extra=extra))
    before = current_incarnations(under_test.wait_steps(3))
    address = under_test.run.metrics.read_text().strip()
    found = scrape(address)
    assert found["rrl_steps_completed"] >= 3
    assert found["rrl_steps_wanted"] == 20
    assert found["rrl_manager_epoch"] == 1
    assert found["rrl_history_lines_lost_total"] == 0
    victim, pid = ReplicaId("rollout/1"), before[ReplicaId("rollout/1")][1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    under_test.wait_back_alone(before, victim)
    state = under_test.wait_end()
    assert state.outcome == "completed", state.why
    under_test.wait_gone()
    assert not under_test.run.metrics.exists()
    (file,) = history.glob("*/*.jsonl")
    kinds = [msgspec.json.decode(text)["kind"] for text in file.read_bytes().splitlines()]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_ended")
    assert {"node_acquired", "finding", "failed", "recovery_done"} <= set(kinds)
    cache = HistoryCache([history], tmp_path / "cache.sqlite")
    assert cache.refresh().skipped == 0
    site = report(cache.records(0.0), 0.0, state.at).site
    cache.close()
    assert (site.failures, site.other_failures) == (0, 1)  # a killed process is no evidence about its node
    assert [(one.owner, one.cause) for one in site.causes] == [("software", "process")]
