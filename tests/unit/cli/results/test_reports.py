"""``rrl report`` as a table, JSON and a page, for one run, two runs or a clean run, and for wrong names."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

import rrl
from rrl.cli import main
from rrl.cli.views.report.page import page
from rrl.cli.views.report.tables import report_view
from rrl.cli.views.sampled_answers import PageSamples
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.sample_texts import DecodedSample, Turn
from rrl.core.text import span
from rrl.core.types import Outcome
from rrl.manager.model import events as ev
from rrl.manager.reporting.accounting.committed_steps import CommittedSteps
from rrl.manager.reporting.accounting.run_report import account
from rrl.manager.storage.journal import Journal
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.text_snapshots import drawn, matches_stored
from rrl.tests.support.manager.accounted import accounted, begun, failed, trained

HOSTILE = "\x1b]0;owned\x07</table><script>alert(1)</script>\u202egnp"


def interrupted(run: str = "small-1120-064114") -> Story:
    """Return a run whose trainer and one of whose rollouts failed."""
    story = trained(begun(), 1, 5).wait(2)
    story = trained(failed(trained(failed(story, "trainer/0"), 6, 9), "rollout/1"), 10, 12)
    return story.ends(Outcome.COMPLETED, "all steps are done")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def test_table_of_one_run_equals_the_snapshot() -> None:
    report = accounted(interrupted()).report()
    matches_stored("report_80", drawn(report_view([report]), 80))


def test_report_of_two_runs_shows_them_side_by_side() -> None:
    other = accounted(trained(begun(), 1, 12))
    other.run = "clean-1120-070000"
    shown = drawn(report_view([accounted(interrupted()).report(), other.report()]), 140)
    matches_stored("report_two_140", shown)
    assert "time lost of small-1120-064114" in shown


def test_command_prints_a_table_and_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted().written(root)
    assert main.run(["report", "small"]) == 0
    assert "ETTR" in capsys.readouterr().out
    assert main.run(["report", "small", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (first,) = printed["runs"]
    assert printed["comparison"] is None
    stages = {stage for loss in first["lost"] for stage in loss["stages"]}
    assert stages == {"detect", "decide", "queue", "start", "load", "reconnect", "replay"}
    assert first["ettr"] == json.loads((root / first["run"] / "summary.json").read_text())["ettr"]
    assert main.run(["status", "small", "--json"]) == 0
    assert first["ettr"] == json.loads(capsys.readouterr().out)["pace"]["ettr"]


def written(root: Path, story: Story, **trainer: object) -> RunDir:
    """Write a run whose job.toml has these settings of the trainer."""
    made = story.written(root)
    made.resolved.write_text(json.dumps({"job": {"run": {"name": story.run[:5]}, "roles": {"trainer": trainer}}}))
    return made


def test_two_runs_are_compared_as_tables_json_and_page(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;owned\x07<script>"
    other = trained(begun("clean-1120-070000"), 1, 20)  # it goes on
    other.record(ev.Evaluated(other.incarnation("trainer/0"), 4, {"reward": 0.5, "pass@1": 0.25}))
    one = written(root, interrupted(), learning_rate=1e-6, loss="grpo")
    clean = written(root, other, learning_rate=1e-5, loss=hostile)
    assert main.run(["report", "small", "clean"]) == 0
    shown = capsys.readouterr().out
    assert f"comparison: A is {one.id}, B is {clean.id}" in shown
    for text in ("rewards at equal steps", "at equal wall time", "figures at step 12", "keys that differ"):
        assert f"\n{text}\n" in shown
    assert re.search(r"\nroles.trainer.learning_rate +1e-06 +1e-05\n", shown)
    assert "Only one of the runs has evaluations." in shown
    assert "\x1b" not in shown
    assert main.run(["report", "small", "clean", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    comparison = printed["comparison"]
    assert [run["run"] for run in printed["runs"]] == [one.id, clean.id]
    last = comparison["by_step"][-1]
    assert (last["at"], [place["step"] for place in last["runs"]]) == (12, [12, 12])
    assert last["runs"][0]["rewards"] == last["runs"][1]["rewards"]
    assert last["runs"][0]["wall_s"] > last["runs"][1]["wall_s"], "the run with the failures was not slower"
    target = root / "both.html"
    assert main.run(["report", "small", "clean", "--html", str(target)]) == 0
    page_text = target.read_text()
    assert not any(tag == "script" for tag, _ in elements(page_text))
    for text in ("rewards at equal steps", "roles.trainer.learning_rate"):
        assert text in page_text


def test_python_returns_the_same_report(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = interrupted().written(root)
    report = rrl.run(run.id).report()
    assert main.run(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == [json.loads(msgspec.json.encode(report))]


def _empty(root: Path) -> list[str]:
    run = RunDir(root / "empty-1120-064114")
    run.create()
    Journal(run, 1).close()
    return ["report", "empty"]


def _damaged(root: Path) -> list[str]:
    (segment, *_) = interrupted().written(root).journal.glob("*.seg")
    segment.write_bytes(b"no journal")
    return ["report", "small"]


def _unwritable(root: Path) -> list[str]:
    interrupted().written(root)
    return ["report", "--html", str(root / "absent" / "x.html")]


def _both(root: Path) -> list[str]:
    interrupted().written(root)
    return ["report", "--json", "--html", str(root / "x.html")]


def _twice(root: Path) -> list[str]:
    run = interrupted().written(root)
    return ["report", "small", str(run.path)]


@pytest.mark.parametrize(
    ("argv", "code", "word"),
    [
        (_empty, 2, "no events yet"),
        (_damaged, 2, "not a journal of rrl"),
        (_unwritable, 1, "x.html"),
        (_both, 2, "exclude each other"),
        (_twice, 2, "small-1120-064114 is named twice; name another run to compare it with"),
    ],
)
def test_report_that_cannot_be_made_is_one_line_with_its_exit_code(
    argv: Callable[[Path], list[str]], code: int, word: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(argv(root)) == code
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1


def test_error_of_the_account_is_not_reported_as_a_run_that_has_not_begun(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("the parts of an interruption do not add up")

    run = interrupted().written(root)
    monkeypatch.setattr(CommittedSteps, "apply", fail)
    with pytest.raises(ValueError, match="do not add up"):
        rrl.run(run.id).report()


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Elements(HTMLParser):
    """Collects the elements of a page, and checks that they are closed in order."""

    VOID = ("meta", "input", "rect", "path", "line", "polyline", "br")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def close(self) -> None:
        super().close()
        assert self._open == []


def elements(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(text)
    parser.close()
    return parser.found


def test_page_is_one_file_without_scripts_that_loads_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted().written(root)
    target = root / "small.html"
    assert main.run(["report", "small", "--html", str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    text = target.read_text()
    found = elements(text)
    assert {tag for tag, _ in found} & {"script", "link", "img", "iframe", "object"} == set()
    assert not any(name.startswith("on") or name in ("src", "href") for _, attributes in found for name in attributes)
    assert "url(" not in text
    policy = [attributes["content"] for _, attributes in found if attributes.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_samples_are_filtered_by_the_only_script_that_the_policy_of_the_page_allows() -> None:
    turns = (Turn(False, False, HOSTILE), Turn(True, True, "4\n<em>2</em>" + 9000 * "x"))
    sample = DecodedSample(3, 1, 20, "", 0.5, 0.5, {"format": 0.25}, None, True, 1, (2, 3), turns)
    text = page([accounted(interrupted()).report()], [PageSamples([(12, sample)], 2)])
    found = elements(text)
    assert [tag for tag, _ in found if tag in ("script", "em", "pre")] == ["pre", "pre", "script"]
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [attributes["content"] for _, attributes in found if attributes.get("http-equiv")]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "step 12 · trajectory 3 · group 1 · item 20 · reward 0.50 (format 0.25)" in text
    assert "4\n&lt;em&gt;2" in text
    assert not set("\x1b\x07\u202e") & set(text)
    assert text.count("x") < 8000


def test_page_of_a_run_whose_samples_cannot_be_read_says_why() -> None:
    text = page([accounted(interrupted()).report()], [PageSamples(missing="no tokenizer <here>")])
    assert "no tokenizer &lt;here&gt;" in text
    assert not any(tag == "script" for tag, _ in elements(text))


def test_page_has_lanes_marks_losses_and_curves() -> None:
    text = page([accounted(interrupted()).report()])
    labels = [attributes.get("aria-label") or "" for tag, attributes in elements(text) if tag == "svg"]
    for replica in ("trajectories/0", "reward/0", "trainer/0", "rollout/0", "rollout/1"):
        assert any(label.startswith(f"{replica}: ") for label in labels), replica
    assert {"injected faults", "decisions", "reward", "weight versions"} <= set(labels)
    assert any(label.startswith("process ") for label in labels), "the page has no bar of lost time"
    assert "<title>rollout/1#2 on n4, launched" in text
    assert "trainer/0 ×2" in text
    assert "killed by signal 9" in text
    assert "ETTR" in text


def test_each_curve_has_a_time_axis_from_the_begin_of_the_run_to_its_end() -> None:
    report = accounted(interrupted()).report()
    figures = page([report]).split("<figure")[1:]
    assert len(figures) == 2
    for figure in figures:
        ticks = re.findall(r'<i style="left: ([\d.]+)%">([^<]+)</i>', figure.partition("</figure>")[0])
        assert (ticks[0], ticks[-1]) == (("0.0", "0s"), ("100.0", span(report.until - report.began)))


def test_all_shapes_lie_within_their_drawings() -> None:
    text = page([accounted(interrupted()).report()])
    for _, attributes in elements(text):
        for name in ("x", "x1", "x2", "width"):
            value = attributes.get(name) or "0"
            assert value.endswith("%") or 0 <= float(value) <= 1000.1
        for pair in re.findall(r"[\d.e+-]+,[\d.e+-]+", attributes.get("points") or ""):
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 1000
            assert 0 <= y <= 120


def test_long_lanes_are_paths_and_the_page_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.cli.views.report.drawing.MAX_TITLED_SPANS", 5)
    text = page([accounted(interrupted()).report()])
    found = elements(text)
    paths = [attributes for tag, attributes in found if tag == "path"]
    assert {str(one["class"]) for one in paths} >= {"works", "starts", "down"}
    assert all(re.fullmatch(r"(M[\d.]+ 0h[\d.]+v10h-[\d.]+z)+", str(one["d"])) for one in paths)


def test_text_of_roles_and_users_cannot_add_elements_or_control_characters() -> None:
    story = trained(begun(), 1, 5)
    story.loses("rollout/0", HOSTILE)
    story.fences("rollout/0", HOSTILE)
    story.stamped = trained(story, 6, 8).stops(Outcome.FAILED, HOSTILE).stamped
    report = account(story.stamped).report()
    text = page([report])
    assert not any(tag == "script" for tag, _ in elements(text))
    assert not set("\x1b\x07\u202e") & set(text)
    assert HOSTILE[-4:-3] not in text


def test_run_without_steps_has_a_page() -> None:
    found = elements(page([accounted(begun()).report()]))
    assert not any(attributes.get("aria-label") == "reward" for _, attributes in found)
