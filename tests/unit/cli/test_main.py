"""The command line as a user meets it.

The tests call ``run``, as the entry point does. One test checks the exit codes of real processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
import typer.main
from typer.testing import CliRunner

from rrl.cli import commands, main
from rrl.cli.commands import command_group
from rrl.cli.common.output import program
from rrl.config.job.schema import Job
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import ManagerSpec, RunSpec
from rrl.core.types import Outcome
from rrl.manager.bootstrap import start as starting
from rrl.manager.model.events import StepCommitted
from rrl.manager.model.state import State
from rrl.manager.reporting.summary import write_summary
from rrl.tests.support.cli.story import Story, completed, job_view
from rrl.tests.support.job_toml import JOB

COMMANDS = (
    "submit",
    "status",
    "logs",
    "cancel",
    "list",
    "check",
    "doctor",
    "init",
    "manage",
    "episodes",
    "endpoint",
    "relay",
    "schema",
    "completion",
)


@pytest.fixture
def job_toml(tmp_path: Path) -> str:
    (tmp_path / "job.toml").write_text(JOB)
    return str(tmp_path / "job.toml")


def output_of(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    return capsys.readouterr()


# ── help, version, mistakes ────────────────────────────────────────────────────────────────────────────────────────
def test_help_names_every_command_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in shown
        assert main.run([command, "--help"]) == 0
        assert "Usage: rrl" in capsys.readouterr().out
    assert not any(line.endswith("...") for line in shown.splitlines()[1:])  # no purpose is cut off
    assert main.run([]) == 0
    assert capsys.readouterr().out == shown


def test_help_shows_every_command_in_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    shown = capsys.readouterr().out
    titles = [line.removesuffix(":") for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options", *command_group.SECTIONS]
    named = [name for names in command_group.SECTIONS.values() for name in names]
    assert sorted(named) == sorted(typer.main.get_group(commands.app).commands)
    assert re.search(r"^  manage +Run a manager here", shown, re.MULTILINE), (
        "rrl --help lacks the command `manage`, which messages tell users to type"
    )


def test_command_words_of_similar_programs_are_answered_with_existing_rrl_commands() -> None:
    group = typer.main.get_group(commands.app)
    assert not set(command_group.COMMAND_WORDS) & set(group.commands)
    answers = list(command_group.COMMAND_WORDS.values())
    for command, options in command_group.OPTION_WORDS.items():
        known = {option for parameter in group.commands[command].params for option in parameter.opts}
        assert not set(options) & known, command
        answers += options.values()
    for answer in answers:
        program, command, *words = answer.split()
        known = {option for parameter in group.commands[command].params for option in parameter.opts}
        assert program == "rrl"
        assert {word for word in words if word.startswith("-")} <= known, answer


def test_the_typer_app_answers_to_its_own_runner() -> None:
    result = CliRunner().invoke(commands.app, ["status", "--help"])
    assert result.exit_code == 0
    assert "--live" in result.stdout


def test_the_version_is_that_of_pyproject(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"rrl {project['version']}\n"


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["canecl"], "rrl: No such command 'canecl'. Did you mean 'cancel'? see: rrl --help"),
        (["status", "--nope"], "rrl: No such option: --nope; see: rrl status --help"),
        (["submit"], "rrl: Missing argument 'JOB.TOML'; see: rrl submit --help"),
        (["resume", "x", "--steps", "abc"], 'rrl: --steps: must be a whole number, not "abc"; see: rrl resume --help'),
        (["resume", "x", "--steps", "0"], 'rrl: --steps: must be at least 1, not "0"; see: rrl resume --help'),
        (["logs", "x", "-n", "1.5"], 'rrl: --lines: must be a whole number, not "1.5"; see: rrl logs --help'),
        (
            ["inject", "x", "slow", "--amount", "half"],
            'rrl: --amount: must be a number, not "half"; see: rrl inject --help',
        ),
        (["submit", "missing.toml"], "rrl: missing.toml: no such file"),
        (["check", "."], 'rrl: .: is a folder; name the file in it, for example "./job.toml"'),
        (["submit", "x", "--set", "run"], "rrl: --set run: has no value; write for example --set run.steps=500"),
        (["check", "run.steps=5"], "rrl: run.steps=5: no such file; to set a key, write --set run.steps=5"),
        (["ps"], 'rrl: "ps" is not a command of rrl; write: rrl list'),
        (["config"], 'rrl: "config" is not a command of rrl; write: rrl check job.toml --defaults'),
        (["submit", "--dry-run", "x"], "rrl: --dry-run is not an option of rrl; write: rrl check job.toml"),
        (["status", "-w"], "rrl: -w is not an option of rrl; write: rrl status RUN --live"),
    ],
)
def test_usage_error_is_one_line_on_stderr_and_exit_code_2(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected_text: str
) -> None:
    assert main.run(arguments) == 2
    assert output_of(capsys) == ("", expected_text + "\n")


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "manage"])
def test_unknown_run_is_one_line_with_candidates(root: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main.run([command, "x"]) == 2
    assert capsys.readouterr().err == f"rrl: there are no runs in {root}; start one with: rrl submit job.toml\n"
    for run in ("small-1", "small-2", "other-1"):
        Story(run).written(root)
    assert main.run([command, "nope"]) == 2
    assert 'no run "nope"' in (reported := capsys.readouterr().err)
    assert "other-1" in reported
    assert main.run([command, "small"]) == 2
    assert 'rrl: "small" fits 2 runs: ' in (reported := capsys.readouterr().err)
    assert reported.count("\n") == 1
    assert main.run([command, "/tmp/nope"]) == 2
    assert capsys.readouterr().err == "rrl: /tmp/nope is not the directory of a run; list the runs with: rrl list\n"


def test_unexpected_error_is_one_line_without_debug_mode(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> int:
        raise KeyError("surprise\nwith a second line")

    monkeypatch.setattr("rrl.cli.run.status.list_runs", broken)
    monkeypatch.delenv(main.DEBUG_ENV, raising=False)
    assert main.run(["list"]) == 1
    reported = capsys.readouterr().err
    assert reported.startswith("rrl: internal error: KeyError: ")
    assert reported.count("\n") == 1
    monkeypatch.setenv(main.DEBUG_ENV, "1")
    with pytest.raises(KeyError):
        main.run(["list"])


# ── status and list ────────────────────────────────────────────────────────────────────────────────────────────────
def test_status_shows_the_newest_run_or_the_one_with_the_given_id_prefix(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = completed("aaa-1").written(root), Story("bbb-1").works().written(root)
    os.utime(old.resolved, (1, 1))
    assert main.run(["status"]) == 0
    assert capsys.readouterr().out.startswith("bbb-1  ● unattended   step 12/40")
    for name in ("aaa", "aaa-1", str(old.path)):
        assert main.run(["status", name]) == 0
        assert capsys.readouterr().out.startswith("aaa-1  ● completed   step 12/12")
    os.utime(new.resolved, (0, 0))
    main.run(["status"])
    assert capsys.readouterr().out.startswith("aaa-1")


def test_an_exact_id_is_never_ambiguous(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("small-1", "small-1-1"):
        Story(run).written(root)
    assert main.run(["status", "small-1"]) == 0
    assert capsys.readouterr().out.startswith("small-1  ")


def test_status_of_a_finished_run_names_its_recoveries(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completed().written(root)
    main.run(["status"])
    assert "↻ rollout/0#1  restart in place on n3; killed by signal 9" in capsys.readouterr().out


def test_status_says_that_no_manager_is_left(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Story().works().written(root)
    main.run(["status"])
    assert f"start one: rrl manage {run.id}" in capsys.readouterr().out


def test_status_as_json_is_the_state_itself(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story().works()
    story.written(root)
    assert main.run(["status", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=State) == story.recorded()


def test_status_as_json_has_the_sections_of_the_summary(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story().works().pulls("rollout/0", 11, 1000, 1000).pulls("rollout/0", 12, 1250, 2000, fallbacks=3)
    counts = {"episodes_at_work": 2.0, "episodes_finished": 9.0, "episodes_dropped": 4.0, "turns": 18.0}
    story.record(StepCommitted(story.incarnation("trainer/0"), 13, counts)).written(root)
    assert main.run(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["turns"], shown["branches"], shown["token_drift"]) == (18, 0, 0)
    assert shown["episodes"] == {"finished": 9, "retried": 0, "replayed": 0, "dropped": 4, "dropped_by_reason": {}}
    assert shown["stream"]["parts"] is None
    assert shown["pace"]["seconds_per_step"] == 3
    assert shown["pace"]["seconds_left"] is None, "a forecast for a run without a manager"
    assert shown["pace"]["weights_lag_steps"] == 1
    assert (shown["pace"]["weights_received_share"], shown["pace"]["delta_fallbacks"]) == (0.25, 3)


def test_status_as_json_has_the_ettr_of_an_ended_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Story("small", job_view(12)).works().wait(60).commits(13).ends(Outcome.COMPLETED, "done").written(root)
    assert main.run(["status", "--json"]) == 0
    pace = json.loads(capsys.readouterr().out)["pace"]
    assert pace["ettr"] == json.loads(run.summary.read_text())["ettr"] < 1
    assert pace["seconds_left"] is None


@pytest.mark.parametrize(("where", "queued"), [("job", "manager"), ("pool", "pool")])
def test_slurm_run_that_has_not_begun_names_the_job_that_starts_its_manager(
    root: Path, capsys: pytest.CaptureFixture[str], where: str, queued: str
) -> None:
    run = RunDir(root / "fresh-1")
    run.create()
    job = msgspec.structs.replace(job_view(), cluster="slurm", manager=ManagerSpec(where))
    run.run_spec.write_bytes(msgspec.json.encode(job))
    assert main.run(["status"]) == 0
    assert capsys.readouterr().out == (
        f"fresh-1: its manager is starting (squeue --name=fresh-1.{queued} shows its job)\n"
    )
    submit_long_ago(run)
    assert main.run(["status"]) == 0
    assert f"(squeue --name=fresh-1.{queued} tells why; " in capsys.readouterr().out


def submit_long_ago(run: RunDir) -> None:
    run.resolved.touch()
    os.utime(run.resolved, (1, 1))


def test_run_without_a_manager_is_starting_for_a_while_and_then_names_the_command(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(root / "fresh-1")
    run.create()
    assert main.run(["status"]) == 0
    assert capsys.readouterr().out == "fresh-1: its manager is starting\n"
    submit_long_ago(run)
    assert main.run(["status"]) == 0
    reported = capsys.readouterr().out
    assert reported.startswith("fresh-1: its manager has not started yet")
    assert "rrl manage fresh-1" in reported
    assert main.run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] is None
    assert main.run(["list"]) == 0
    assert "submitted" in capsys.readouterr().out


def test_a_journal_that_cannot_be_read_is_one_line_and_exit_code_2(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Story("bad-1").written(root)
    completed("good-1").written(root)
    (run.journal / "000009-000001.seg").write_bytes(b"something that is no journal at all")
    assert main.run(["status", "bad-1"]) == 2
    reported = capsys.readouterr().err
    assert "not a journal of rrl" in reported
    assert reported.count("\n") == 1
    assert main.run(["list"]) == 0  # the damaged run does not hide the others
    shown = capsys.readouterr().out
    assert "unreadable" in shown
    assert "good-1" in shown


def test_list_gives_stable_keys_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["list"]) == 0
    assert capsys.readouterr().out == f"no runs in {root}\n"
    completed("aaa-1").written(root)
    assert main.run(["list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert set(row) == {
        "schema",
        "run",
        "name",
        "outcome",
        "standing",
        "step",
        "steps",
        "reward",
        "recoveries",
        "started",
        "ended",
        "run_seconds",
        "run_dir",
        "why",
    }
    assert (row["run"], row["outcome"], row["step"], row["recoveries"]) == ("aaa-1", "completed", 12, 1)


def test_global_option_after_the_command_is_answered_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["list", "--runs-dir", "/tmp"]) == 2
    assert capsys.readouterr().err == "rrl: --runs-dir belongs before the command; see: rrl --help\n"


@pytest.mark.parametrize(
    ("started", "on_path", "shown"),
    [
        (".venv/bin/rrl", False, ".venv/bin/rrl"),
        (".venv/bin/rrl", True, "rrl"),
        ("/opt/rrl", False, "/opt/rrl"),
        ("pytest", False, "rrl"),
    ],
)
def test_advice_names_the_program_as_the_user_can_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str, on_path: bool, shown: str
) -> None:
    (tmp_path / "rrl").write_text("#!/bin/sh\n")
    (tmp_path / "rrl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if on_path else "/nowhere")
    monkeypatch.setattr(sys, "argv", [started])
    assert program() == shown


def test_option_runs_dir_overrides_the_environment(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    completed("else-1").written(tmp_path / "elsewhere")
    assert main.run(["--runs-dir", str(tmp_path / "elsewhere"), "status"]) == 0
    assert capsys.readouterr().out.startswith("else-1")


# ── check and submit ───────────────────────────────────────────────────────────────────────────────────────────────
def test_check_prints_the_resolved_spec_and_the_plan_and_touches_nothing(
    root: Path, job_toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["check", "--no-task", "--defaults", job_toml]) == 0
    shown = capsys.readouterr().out
    assert 'walltime = "1d"' in shown
    assert "rrl.roles.trainer.main" in shown
    assert shown.endswith("its task was not tried (--no-task); nothing was submitted\n")
    assert list(root.iterdir()) == []


def test_check_as_json_has_the_resolved_job_and_the_plan(job_toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["check", "--no-task", job_toml, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["job"]["cluster"]["walltime"] == 86400
    assert [set(part) for part in reported["plan"]] == [{"title", "text"}] * len(reported["plan"])


@pytest.mark.parametrize("command", ["check", "submit"])
def test_an_option_that_rrl_sets_itself_is_refused_before_anything_starts(
    root: Path, job_toml: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    Path(job_toml).write_text(JOB.replace('"local"', '"slurm"') + "[slurm]\nnodes = 3\n")
    assert main.run([command, job_toml]) == 2
    reported = capsys.readouterr().err
    assert "'nodes' is reserved" in reported
    assert reported.count("\n") == 1
    assert list(root.iterdir()) == []


def test_invalid_spec_is_reported_line_by_line(root: Path, job_toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(job_toml).write_text(JOB.replace("replicas", "replica").replace("steps = 10", "steps = 0"))
    assert main.run(["submit", job_toml]) == 2
    assert output_of(capsys) == (
        "",
        f"rrl: {job_toml}:3: run.steps: must be at least 1, not 0\n"
        f'rrl: {job_toml}:17: roles.rollout.replica: unknown key; did you mean "replicas"?\n',
    )


def _pretends(monkeypatch: pytest.MonkeyPatch, root: Path, story: Story) -> None:
    """Replace the start of a run: only write the run directory of ``story``. Other test modules test the start."""

    def create(job: Job, spec: RunSpec, source: Path, text: bytes) -> RunDir:
        return story.written(root)

    def start(run: RunDir, spec: RunSpec) -> str:
        return ""

    def run_here(run: RunDir, foreground: bool = False, by_hand: bool = False) -> str | None:
        write_summary(run)
        return None if story.recorded().outcome is None else story.recorded().outcome

    monkeypatch.setattr(starting, "create", create)
    monkeypatch.setattr(starting, "start_manager", start)
    monkeypatch.setattr(starting, "run_manager", run_here)


def test_submit_prints_only_the_id_on_stdout(
    root: Path, job_toml: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretends(monkeypatch, root, Story("small-7"))
    assert main.run(["submit", job_toml]) == 0
    assert output_of(capsys) == ("small-7\n", "watch it with: rrl status small-7 --live\n")


def test_submit_as_json_names_run_and_folder(
    root: Path, job_toml: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretends(monkeypatch, root, Story("small-7"))
    assert main.run(["submit", job_toml, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 2, "run": "small-7", "run_dir": f"{root}/small-7"}


@pytest.mark.parametrize("how", ["--wait", "--foreground"])
@pytest.mark.parametrize(("outcome", "code"), [(Outcome.COMPLETED, 0), (Outcome.FAILED, 1), (Outcome.REJECTED, 2)])
def test_awaited_run_ends_with_a_summary_and_its_exit_code(
    root: Path,
    job_toml: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    outcome: Outcome,
    code: int,
) -> None:
    _pretends(monkeypatch, root, Story("small-7").works().ends(outcome, "so it was told"))
    assert main.run(["submit", job_toml, how]) == code
    shown = capsys.readouterr().out
    assert f"small-7: {outcome.value}, step 12/40, reward 0.94" in shown
    assert f"small-7  ● {outcome.value}   12 steps in 44s" in shown
    assert main.run(["--runs-dir", str(root / how), "submit", job_toml, how, "--json"]) == 2  # the run is there already


@pytest.mark.parametrize("how", ["--wait", "--foreground"])
def test_waiting_with_json_leaves_only_the_summary_on_stdout(
    root: Path, job_toml: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    _pretends(monkeypatch, root, completed("small-7"))
    assert main.run(["submit", job_toml, how, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "completed"


def test_a_start_that_fails_is_one_line_and_exit_code_1_and_leaves_nothing(
    root: Path, job_toml: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(run: RunDir, view: RunSpec) -> str:
        raise RuntimeError("sbatch: error: Socket timed out")

    monkeypatch.setattr(starting, "start_manager", refused)
    assert main.run(["submit", job_toml]) == 1
    assert capsys.readouterr().err == "rrl: the run could not be started: sbatch: error: Socket timed out\n"
    assert list(root.iterdir()) == []


def test_a_folder_of_runs_that_cannot_be_written_is_one_line_and_exit_code_2(
    tmp_path: Path, job_toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()  # root may write everywhere except below a file
    assert main.run(["--runs-dir", f"{tmp_path}/file/runs", "submit", job_toml]) == 2
    reported = capsys.readouterr().err
    assert reported == (
        f"rrl: no run can be made in {tmp_path}/file/runs: Not a directory; name another folder with --runs-dir\n"
    )


def test_a_disk_that_is_full_is_one_line_and_exit_code_2_and_leaves_nothing(
    root: Path, job_toml: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes, mode: int = 0o600) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(starting, "write_atomically", full)
    assert main.run(["submit", job_toml]) == 2
    reported = capsys.readouterr().err
    assert "No space left on device" in reported
    assert reported.count("\n") == 1
    assert list(root.iterdir()) == []


def test_ended_run_gets_no_manager(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completed("small-7").written(root)
    assert main.run(["manage", "small-7"]) == 2
    assert capsys.readouterr().err == "rrl: small-7 has ended already: completed\n"


# ── the command as a process ───────────────────────────────────────────────────────────────────────────────────────
def test_exit_codes_and_streams_are_the_same_in_a_process_of_its_own(root: Path, job_toml: str) -> None:
    completed("small-7").written(root)

    def rrl(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; from rrl.cli.main import main; sys.argv[1:] = {list(arguments)!r}; main()"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    good, bad, wrong = rrl("status"), rrl("status", "nope"), rrl("check", f"{job_toml}/x")
    assert (good.returncode, good.stderr) == (0, "")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert (wrong.returncode, wrong.stderr) == (2, f"rrl: {job_toml}/x: cannot be read: Not a directory\n")
    assert all(len(line) <= 100 and line == line.rstrip() for line in good.stdout.splitlines())


def test_status_of_a_finished_run_imports_nothing_heavy(root: Path) -> None:
    completed("small-7").written(root)
    code = (
        "import sys; from rrl.cli.main import run; assert run(['status']) == 0;"
        "heavy = {'pydantic', 'tomlkit', 'tomllib', 'zmq', 'jinja2', 'typer', 'submitit', 'torch', 'asyncio', 'numpy'};"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
