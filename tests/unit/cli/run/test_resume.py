"""Requests that ``rrl resume`` and ``rrl restart`` refuse.

tests/integration/local/test_resume.py resumes real runs.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.cli import main
from rrl.config.job.load import load_job
from rrl.config.job.resolve import resolve
from rrl.core.launch import read_run_spec
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import Outcome
from rrl.manager.bootstrap import start as starting
from rrl.manager.bootstrap.start import create
from rrl.manager.storage import resume_request
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.job_toml import JOB

RUN = "small-7"


class Ended:
    """A run that failed at step 12 of 40, as ``rrl submit`` and its manager left it.

    ``started`` counts the resumes. ``starts`` replaces the start of a manager: by default it claims the resume request
    and installs the new job, as a manager does when it begins.
    """

    def __init__(
        self,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        outcome: Outcome = Outcome.FAILED,
        why: str = "no time left",
        more: str = "",
    ) -> None:
        monkeypatch.setenv(RUNS_ENV, str(root / "runs"))
        self.job = root / "job.toml"
        self.job.write_text(JOB.replace("steps = 10", "steps = 40") + more)
        printed = Story(RUN, job_view()).works().ends(outcome, why).written(root / "runs")
        job = load_job(self.job)
        made = create(job, resolve(job, "python"), self.job)
        for path in (made.job_toml, made.resolved, made.run_spec, made.keys):
            path.rename(printed.path / path.name)
        self.run, self.started = printed, 0
        self.starts: Callable[[], None] = self.begin
        monkeypatch.setattr(starting, "start_manager", self._start)

    def _start(self, *_: object) -> str:
        self.starts()
        return ""

    def begin(self) -> None:
        self.started += 1
        assert resume_request.claim(self.run) is not None
        resume_request.install(self.run)

    def everything(self) -> dict[Path, bytes | None]:
        return {path: path.read_bytes() if path.is_file() else None for path in self.run.path.rglob("*")}

    def refuses(self, capsys: pytest.CaptureFixture[str], *options: str) -> str:
        """Return the message of a refused resume, and check that it has changed and started nothing."""
        before = self.everything()
        assert main.run(["resume", RUN, *options]) == 2
        assert self.everything() == before
        assert self.started == 0
        return capsys.readouterr().err


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    return Ended(tmp_path, monkeypatch)


def test_run_is_resumed_with_more_steps_and_time_and_a_valid_new_spec(ended: Ended) -> None:
    assert main.run(["resume", RUN, "--steps", "50", "--walltime", "2h"]) == 0
    job = load_job(ended.run.job_toml)
    assert (job.run.steps, job.cluster.walltime, ended.started) == (50, 7200.0, 1)
    assert not ended.run.resume.exists()
    assert not ended.run.resume_claimed.exists()


def test_program_beside_the_job_is_looked_for_there_and_not_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "trainer.py"
    program.write_text("import rrl\n")
    ended = Ended(tmp_path, monkeypatch, more='[roles.trainer]\ncommand = ["python", "trainer.py"]\n')
    program.rename(tmp_path / "moved.py")
    assert f'"trainer.py" does not exist in {tmp_path}, the folder of job.toml' in ended.refuses(capsys)
    (tmp_path / "moved.py").rename(program)
    assert main.run(["resume", RUN, "--steps", "50"]) == 0


def test_nothing_is_changed_if_no_manager_can_be_started(ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError("no such partition")

    ended.starts, before = fail, ended.everything()
    assert main.run(["resume", RUN, "--steps", "50"]) == 1
    assert capsys.readouterr().err == f"rrl: {RUN} could not be resumed: no such partition\n"
    assert ended.everything() == before
    ended.starts = ended.begin
    assert main.run(["resume", RUN]) == 0
    assert load_job(ended.run.job_toml).run.steps == 40


def test_folder_of_the_job_that_others_may_write_by_now_is_refused(
    ended: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    ended.job.parent.chmod(0o777)
    assert f"every user may write {ended.job.parent}, and so make code run as you" in ended.refuses(capsys)
    assert main.run(["resume", RUN, "--trust-folder"]) == 0


def test_manager_that_took_the_request_continues_although_its_start_was_reported_as_failed(
    ended: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    def unanswered() -> None:
        ended.begin()
        raise RuntimeError("sbatch: timed out")

    ended.starts = unanswered
    assert main.run(["resume", RUN, "--steps", "50"]) == 0
    assert "although its start was reported as failed: sbatch: timed out" in capsys.readouterr().err
    assert load_job(ended.run.job_toml).run.steps == 50


@pytest.mark.parametrize("when", ["while the first prepares", "before a manager takes it up", "and after"])
def test_second_of_two_concurrent_resumes_is_refused_in_one_line(
    ended: Ended, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    other = ended.job.with_name("other.toml")
    other.write_text(ended.job.read_text().replace("steps = 40", "steps = 77"))
    printed: dict[str, tuple[int, str]] = {}

    def second() -> None:
        ended.starts = lambda: None
        printed["second"] = main.run(["resume", RUN, "--job", str(other)]), capsys.readouterr().err

    def takes() -> None:
        assert resume_request.claim(ended.run) is not None
        second()

    def prepares(run: RunDir, *what: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setenv(RUNS_ENV, str(ended.run.path.parent))
        monkeypatch.setattr(starting, "start_manager", ended._start)
        starting._write_spec(run, *what)
        second()

    ended.starts = takes if when == "and after" else second
    if when == "while the first prepares":
        monkeypatch.setattr(starting, "_write_spec", prepares)
    printed["first"] = main.run(["resume", RUN, "--steps", "50"]), capsys.readouterr().err
    ended.begin()
    wins, loses = ("second", "first") if "prepares" in when else ("first", "second")
    assert printed[wins][0] == 0
    ordered = "has already requested to resume the run; if no manager starts: rrl manage"
    assert printed[loses] == (1, f"rrl: {RUN} could not be resumed: {getpass.getuser()} {ordered} {RUN}\n")
    steps = load_job(ended.run.job_toml).run.steps
    assert steps == (77 if wins == "second" else 50)
    assert msgspec.json.decode(ended.run.resolved.read_bytes())["job"]["run"]["steps"] == steps


def test_request_that_no_manager_took_is_taken_by_one_started_by_hand(
    ended: Ended, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main.run(["manage", RUN]) == 2
    assert "has ended already" in capsys.readouterr().err
    ended.starts = lambda: None
    assert main.run(["resume", RUN, "--steps", "50"]) == 0
    monkeypatch.setattr(starting, "run_manager", lambda run, foreground, by_hand: ended.begin())
    assert main.run(["manage", RUN]) == 0
    assert load_job(ended.run.job_toml).run.steps == 50


def test_resume_after_another_resume_starts_nothing(ended: Ended) -> None:
    before, job = ended.everything(), load_job(ended.job)
    with pytest.raises(RuntimeError, match="the run has been resumed already"):
        starting.resume(ended.run, job, resolve(job, "python"), ended.job.read_bytes(), ended.job, end=-1.0)
    assert (ended.everything(), ended.started) == (before, 0)


COMMITTED = f"{RUN} has committed 12 steps already; to train more, for example: rrl resume {RUN} --steps 24"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--walltime", "0s"), '--walltime: must be more than 0, not "0s"'),
        (("--walltime", "8"), "--walltime: '8' is not a duration; write for example"),
        (("--steps", "12"), COMMITTED),
        (("--steps", "10"), COMMITTED),
        (("--steps", "0"), '--steps: must be at least 1, not "0"'),
    ],
)
def test_invalid_request_is_refused_and_nothing_is_changed(
    ended: Ended, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], why: str
) -> None:
    assert ended.refuses(capsys, *options).startswith(f"rrl: {why}")


def test_fewer_steps_than_a_complete_run_has_are_refused_with_the_true_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = Ended(tmp_path, monkeypatch, Outcome.COMPLETED, "step 12 of 12 is committed")
    assert complete.refuses(capsys, "--steps", "10") == f"rrl: {COMMITTED}\n"


def test_walltime_too_short_for_a_role_is_refused(ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    spec = JOB.replace("steps = 10", "steps = 40").replace('"local"', '"slurm"\nform = "replica"')
    ended.run.job_toml.write_text(spec.replace("replicas = 2", 'replicas = 2\nwalltime = "2h"'))
    assert ended.refuses(capsys, "--walltime", "1h") == (
        f'rrl: {ended.run.job_toml}:19: roles.rollout.walltime: "2h" is more than [cluster] walltime = "1h"; lower it'
        " or raise the walltime of the run\n"
    )


_OWN_ROLLOUT = '\nper_token = "8B"\n[roles.rollout]\ncommand = ["true"]'


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("run.name", '"small"', '"other"'),
        ("run.seed", "steps = 40", "steps = 40\nseed = 3"),
        ("model", "0123456789+= ", "01"),
        ("task", "min_terms = 2", "min_terms = 3"),
        ("cluster.kind", '"local"', '"slurm"'),
        ("sampling.extras", "[roles.rollout]", f"[sampling.extras.experts]{_OWN_ROLLOUT}"),
    ],
)
def test_another_job_is_refused(ended: Ended, capsys: pytest.CaptureFixture[str], key: str, old: str, new: str) -> None:
    assert old in ended.job.read_text()
    ended.job.write_text(ended.job.read_text().replace(old, new))
    printed = ended.refuses(capsys, "--job", str(ended.job))
    lines = {"run.name": 2, "run.seed": 4, "cluster.kind": 6, "model": 9, "task": 12, "sampling.extras": 16}
    assert printed == f"rrl: {ended.job}:{lines[key]}: {key}: is different in {RUN}; to change it start a new run\n"


def test_a_setting_replaces_a_key_of_the_runs_own_job(ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended.refuses(capsys, "--set", "run.seed=3") == (
        f"rrl: --set run.seed=3: is different in {RUN}; to change it start a new run\n"
    )
    wrong = 'rrl: --set roles.rollout.replicsa=3: unknown key; did you mean "replicas"?\n'
    assert ended.refuses(capsys, "--set", "roles.rollout.replicsa=3") == wrong
    assert main.run(["resume", RUN, "--set", "roles.rollout.replicas=3", "--steps", "50"]) == 0
    job = load_job(ended.run.job_toml)
    assert (job.roles.rollout.replicas, job.run.steps, job.roles.rollout.env) == (3, 50, {"FOO": "bar"})


def test_files_of_a_resume_are_merged_from_left_to_right(ended: Ended) -> None:
    more = ended.job.with_name("more.toml")
    more.write_text("[run]\nsteps = 60\n[roles.rollout]\nreplicas = 3\n")
    assert main.run(["resume", RUN, "--job", str(ended.job), "--job", str(more)]) == 0
    job = load_job(ended.run.job_toml)
    assert (job.run.steps, job.roles.rollout.replicas, job.run.name) == (60, 3, "small")


def test_maximum_length_of_texts_may_change(ended: Ended) -> None:
    """A prompt that does not fit may have been the reason for which the run ended."""
    longer = "[model]\nmax_length = 50\n[model.tokenizer]"
    ended.job.write_text(ended.job.read_text().replace("[model.tokenizer]", longer))
    assert main.run(["resume", RUN, "--steps", "50", "--job", str(ended.job)]) == 0
    model = load_job(ended.run.job_toml).model
    assert model is not None
    assert model.max_length == 50


def test_composition_of_steps_from_groups_may_change(ended: Ended) -> None:
    """The composition may change even if some parts of a step are bound: the store answers either kind of request."""
    sampling = "[sampling]\nstream = true\nstaleness = 2\nwindow = 2\n[model.tokenizer]"
    ended.job.write_text(ended.job.read_text().replace("[model.tokenizer]", sampling))
    assert main.run(["resume", RUN, "--steps", "50", "--job", str(ended.job)]) == 0
    spec = read_run_spec(ended.run.run_spec)
    assert (spec.sampling.stream, spec.sampling.staleness, spec.sampling.window) == (True, 2, 2)


def test_task_argument_with_the_name_of_a_model_key_may_not_change(
    ended: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = msgspec.json.decode(ended.run.resolved.read_bytes())
    resolved["job"]["task"]["args"]["max_length"] = 5
    ended.run.resolved.write_bytes(msgspec.json.encode(resolved))
    ended.job.write_text(ended.job.read_text().replace("min_terms = 2", "min_terms = 2, max_length = 9"))
    printed = ended.refuses(capsys, "--job", str(ended.job))
    assert printed == f"rrl: {ended.job}:12: task: is different in {RUN}; to change it start a new run\n"


def test_reward_may_not_be_added(ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    resolved = msgspec.json.decode(ended.run.resolved.read_bytes())
    task = {"file": "prompts.jsonl", "rewards": {"right": {"function": "a:b"}}}
    resolved["job"]["task"] = {
        **resolved["job"]["task"],
        **task,
        "dataset": None,
        "args": {},
        "file": str(ended.job.with_name("a.jsonl")),
    }
    ended.run.resolved.write_bytes(msgspec.json.encode(resolved))
    dataset = 'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }\n'
    files = 'file = "a.jsonl"\nrewards = { right = { function = "a:b" }, short = { function = "a:c" } }\n'
    text = ended.job.read_text()
    assert dataset in text
    ended.job.write_text(text.replace(dataset, files))
    printed = ended.refuses(capsys, "--job", str(ended.job))
    assert printed == f"rrl: {ended.job}:12: task: is different in {RUN}; to change it start a new run\n"


def test_run_without_its_job_spec_resumes_with_the_given_one(ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    ended.run.job_toml.unlink()
    assert ended.refuses(capsys).endswith(
        "no such file; it was a copy of your job spec: name the original with --job\n"
    )
    assert main.run(["resume", RUN, "--job", str(ended.job)]) == 0
    assert (ended.run.job_toml.read_bytes(), ended.started) == (ended.job.read_bytes(), 1)


def test_run_of_an_earlier_rrl_with_fewer_spec_keys_counts_as_the_same_job(ended: Ended) -> None:
    resolved = msgspec.json.decode(ended.run.resolved.read_bytes())
    del resolved["job"]["task"]["size"]
    ended.run.resolved.write_bytes(msgspec.json.encode(resolved))
    assert main.run(["resume", RUN, "--job", str(ended.job)]) == 0


@pytest.mark.parametrize(
    ("outcome", "advice"),
    [
        (Outcome.COMPLETED, f"{RUN} is complete; to train more steps: rrl resume {RUN} --steps 24"),
        (Outcome.FAILED, f"{RUN} has ended (failed); to continue it: rrl resume {RUN}"),
        (None, f"{RUN} is ending: no replica is restarted any more"),
    ],
)
def test_restart_after_the_end_advises_what_is_possible(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: Outcome | None,
    advice: str,
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    story = Story(RUN, job_view(12)).works()
    story = story.stops(Outcome.COMPLETED, "done") if outcome is None else story.ends(outcome, "done")
    story.written(tmp_path)
    assert main.run(["restart", RUN, "rollout/0"]) == 2
    assert capsys.readouterr().err == f"rrl: {advice}\n"


def test_restart_of_a_single_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    job = job_view()
    roles = tuple(msgspec.structs.replace(one, ranks=2) if one.name == "trainer" else one for one in job.roles)
    run: RunDir = Story(RUN, msgspec.structs.replace(job, roles=roles)).works().written(tmp_path)
    assert main.run(["restart", RUN, "trainer/0.1"]) == 2
    whole = f"which restarts as a whole: rrl restart {RUN} trainer/0"
    assert capsys.readouterr().err == f"rrl: trainer/0.1 is one rank of trainer/0, {whole}\n"
    assert not list(run.mailbox.glob("*.json"))
