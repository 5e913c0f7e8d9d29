"""The state of a node between two evaluations, and the rules that apply to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.config import health_rules_file
from rrl.config.health_rules import Rules
from rrl.config.health_rules_file import CONFIG_ENV, RulesError, load_rules, parse_rules
from rrl.health.checks.evaluate import CHECKS, unknown_checks
from rrl.health.checks.node_state import CounterHistory
from rrl.health.checks.xid_events import XidEvent
from rrl.health.readers.samples import DcgmData, DcgmGpu
from rrl.tests.support.health.simulated_node import ObservedNode, gpu

DOCS = Path(__file__).parents[4] / "docs"


# ── counters ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_first_total_of_a_counter_is_its_start_value() -> None:
    trail = CounterHistory(100, 40)
    assert (trail.increase, trail.increase_within(1000, 200)) == (0, 0)
    trail.add(150, 43)
    assert (trail.increase, trail.increase_within(60, 200), trail.increase_within(40, 200)) == (3, 3, 0)


def test_a_counter_that_starts_over_has_not_risen() -> None:
    trail = CounterHistory(100, 40)
    trail.add(110, 50)
    trail.add(120, 2)
    assert trail.increase == 0
    trail.add(130, 4)
    assert trail.increase_within(60, 130) == 2


def test_counter_that_returns_to_its_value_has_not_risen_and_a_reset_counter_has() -> None:
    trail = CounterHistory(100, 40)
    trail.add(110, 50)
    for at, total in ((200, 3), (210, 0), (240, 52)):
        trail.add(at, total)
    assert (trail.increase, trail.increase_within(60, 240), trail.start) == (12, 2, 100)
    anew = CounterHistory(100, 15)  # perfquery -R
    for at, total in ((200, 0), (210, 1), (220, 15)):
        anew.add(at, total)
    assert anew.increase == 15
    late = CounterHistory(100, 1)
    late.add(200, 0)
    late.add(900, 1)
    assert late.increase == 1, "a count after minutes at zero was not added to the increase"


def test_a_counter_that_rises_every_second_for_a_day_costs_little() -> None:
    trail = CounterHistory(0, 0)
    for second in range(1, 86_400):
        trail.add(second, second)
    assert len(list(trail.increase_times())) < 2000
    assert trail.increase_within(60, 86_399) == pytest.approx(60, abs=6)
    assert trail.increase == 86_399


def test_stored_xids_are_bounded_during_a_flood_of_xids() -> None:
    node = ObservedNode().gpus()
    for _ in range(700):
        node.passes(200).node_state.xids.add(_event(node.now))
    assert len(node.node_state.xids.events) <= 500


def _event(at: float) -> XidEvent:
    return XidEvent("GPU-0", 13, at)


def test_checks_of_a_node_with_eight_gpus_cost_little_cpu_time() -> None:
    """The work for one second of eight GPUs, sampled at 1 Hz with all their links, takes a few milliseconds."""
    from time import process_time

    node = ObservedNode().gpus(*(gpu(i) for i in range(8)), times=5)
    start = process_time()
    node.gpus(*(gpu(i) for i in range(8)), times=100)
    assert (process_time() - start) / 100 < 0.01


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_rules_of_a_site_set_expectations_check_modes_xid_classes_and_limits() -> None:
    rules = parse_rules(
        '[expect]\ngpus = 8\nmounts = ["/scratch"]\n[checks]\ngpu_throttle = "off"\n[xid.classes]\n109 = "app"\n'
        "[gpu]\nhot = 60\n"
    )
    assert (rules.expect.gpus, rules.expect.mounts, rules.gpu.hot) == (8, ("/scratch",), 60)
    assert (rules.checks, rules.xid.classes) == ({"gpu_throttle": "off"}, {"109": "app"})
    assert rules.required_readers("nvml") == {"nvml"}


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        ("[gpu]\nhott = 3\n", 'site.toml:2: gpu.hott: unknown key; did you mean "hot"?'),
        ("\n[gpus]\n", 'site.toml:2: gpus: unknown key; did you mean "gpu"?'),
        ('[expect]\ngpus = "8"\n', "site.toml:2: expect.gpus: expected `int | null`, got `str`"),
        ('[checks]\ngpu_lost = "on"\n', "site.toml:1: checks: invalid enum value 'on'"),
        ("[xid.classes]\nfoo = 'app'\n", "site.toml:2: xid.classes.foo: is not an Xid; write its number in quotes"),
        ("[gpu]\nhot = -1\n", "site.toml:2: gpu.hot: must be at least 0, not -1"),
        ("x = \x1b[31m", "site.toml: "),
    ],
)
def test_a_mistake_in_the_rules_is_one_line(text: str, expected_text: str) -> None:
    with pytest.raises(RulesError) as caught:
        parse_rules(text, "site.toml")
    assert str(caught.value).startswith(expected_text)
    assert str(caught.value).isprintable()


def test_rules_are_read_from_the_configured_file_or_else_defaults_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    monkeypatch.setattr(health_rules_file, "DEFAULT_CONFIG_PATH", tmp_path / "health.toml")
    assert load_rules() == Rules()
    (tmp_path / "health.toml").write_text("[expect]\ngpus = 4\n")
    assert load_rules().expect.gpus == 4
    (tmp_path / "other.toml").write_text("[expect]\ngpus = 2\n")
    monkeypatch.setenv(CONFIG_ENV, str(tmp_path / "other.toml"))
    assert load_rules().expect.gpus == 2
    with pytest.raises(RulesError, match=r"no.toml: cannot be read: No such file"):
        load_rules(tmp_path / "no.toml")
    (tmp_path / "latin.toml").write_bytes(b"\xff")
    with pytest.raises(RulesError, match="is not UTF-8"):
        load_rules(tmp_path / "latin.toml")


def test_unknown_check_name_in_rules_is_reported() -> None:
    assert unknown_checks(Rules(checks={"gpu_lots": "off", "gpu_lost": "off"})) == ["gpu_lots"]


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_row_of_each_check_in_the_docs_matches_the_code() -> None:
    header = "| check | reads | looks at | when it is bad | source |\n|---|---|---|---|---|\n"
    _, _, below = (DOCS / "health.md").read_text().partition(header)
    table = below.partition("\n\n")[0].splitlines()
    for check in CHECKS:
        cells = (", ".join(check.readers), check.description, check.failure_description, check.threshold_source)
        row = f"| `{check.name}` | {' | '.join(cells)} |"
        assert row in table, row
    assert len(table) == len(CHECKS)
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_rules_file_writable_by_everybody_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "health.toml"
    path.write_text("[expect]\ngpus = 99\n")
    path.chmod(0o666)
    with pytest.raises(RulesError, match="every user can write this file"):
        load_rules(path)
    path.chmod(0o664)
    assert load_rules(path).expect.gpus == 99


def test_dcgm_values_of_gpus_that_only_dcgm_lists_are_dropped() -> None:
    gpus = tuple(DcgmGpu(uuid=uuid, remap_failed=True) for uuid in ("GPU-0", "GPU-driver", "GPU-made-up"))
    data = DcgmData(gpus=gpus, driver_gpus=("GPU-driver",))
    node = ObservedNode().reads(data)
    assert [one.component for one in node.of("dcgm_memory")] == ["GPU-driver"]
    assert {one.component for one in ObservedNode().gpus().reads(data).of("dcgm_memory")} == {"GPU-0", "GPU-driver"}
