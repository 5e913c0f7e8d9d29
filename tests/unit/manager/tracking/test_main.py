"""The process of a tracker, with the real packages, sends each step once and in order.

This also holds if the process is killed at any call.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import msgspec
import pytest

from rrl.core.run_dir import RunDir
from rrl.core.run_spec import TrackSpec
from rrl.core.types import Outcome
from rrl.manager.model import events as ev
from rrl.manager.storage.journal import Journal
from rrl.manager.tracking.main import FOLLOW, HIDDEN, HUNG_EXIT, LOCKED_EXIT, ONCE, UNTIL_END
from rrl.manager.tracking.tracker_files import Progress, log_file, read_progress
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.listening_manager import wait_until
from rrl.tests.support.trackers.forked_process import PARENT, fork_server, start
from rrl.tests.support.trackers.sent_steps import (
    check_once_each,
    mlflow_runs,
    sent,
    sent_tables,
    tensorboard_scalars,
    write_samples,
)

pytestmark = pytest.mark.long
TRACKERS = ("tensorboard", "wandb", "mlflow")
TIMEOUT_S = 120.0
STEPS = 12
"""Number of steps of :meth:`Story.works`."""
OPENING, FIRST, MIDDLE, LAST, FLUSH = 1, 2, 7, 1 + STEPS, 2 + STEPS
"""Numbers of the tracker calls after which a test kills the process."""
KILL_AFTER_CALLS = """
import os, signal, sys
from rrl.manager.tracking import main
calls = 0
ended = main.Deadline.__exit__
def count(self, *error):
    global calls
    calls += 1
    if calls == {}:
        os.kill(os.getpid(), signal.SIGKILL)
    ended(self, *error)
main.Deadline.__exit__ = count
sys.exit(main.main())
"""
"""Program that runs the process of a tracker and kills it after a given number of the tracker's answers."""
PROGRAM = "import sys; from rrl.manager.tracking import main; sys.exit(main.main())"


class Recorded:
    """A run whose journal is written from a story, one part after the other."""

    def __init__(self, folder: Path, story: Story, server: ForkServerContext) -> None:
        self.story, self._written, self._server = story, len(story.stamped), server
        self.run: RunDir = story.written(folder)
        self.run.trackers.mkdir()
        self.set_job({"roles": {"trainer": {"learning_rate": 0.001}}})

    def set_job(self, job: dict[str, object]) -> None:
        self.run.resolved.write_bytes(msgspec.json.encode({"job": job}))

    def write(self) -> None:
        """Write the story's events since the last call, as a new manager."""
        self.story.epoch += 1
        journal = Journal(self.run, self.story.epoch)
        for stamped in self.story.stamped[self._written :]:
            journal.append(msgspec.structs.replace(stamped, epoch=self.story.epoch))
        journal.close()
        self._written = len(self.story.stamped)

    def start(self, tracker: str, mode: str, program: str = PROGRAM, **env: str) -> ForkServerProcess:
        argv = (str(self.run.path), tracker, PARENT, mode)
        whole = {**os.environ, "WANDB_MODE": "offline", **env}
        return start(self._server, program, argv, whole, self.run.path, log_file(self.run, tracker))

    def track(self, tracker: str, mode: str = ONCE, program: str = PROGRAM, **env: str) -> int | None:
        return exit_code(self.start(tracker, mode, program, **env))

    def output(self, tracker: str) -> str:
        return log_file(self.run, tracker).read_text(errors="replace")


def exit_code(process: ForkServerProcess) -> int | None:
    """Wait for the end of a process, and return its exit code, or None if it did not end in time."""
    process.join(TIMEOUT_S)
    return process.exitcode


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServerContext]:
    """Yield the process from which the processes of trackers are forked."""
    with fork_server() as context:
        yield context


@pytest.fixture
def recorded(tmp_path: Path, server: ForkServerContext) -> Recorded:
    story = Story("small-1120-064114", job_view(steps=40)).works().recovers("rollout/0")
    return Recorded(tmp_path, story, server)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_each_step_is_sent_once_although_the_process_is_killed_at_calls_of_each_kind(
    recorded: Recorded, tracker: str
) -> None:
    recorded.story.clocks("trainer/0", train=30.0)  # completes the rows
    recorded.write()
    write_samples(recorded.run, range(1, STEPS + 1))
    for calls in (OPENING, FIRST, MIDDLE, LAST, FLUSH):
        code = recorded.track(tracker, ONCE, KILL_AFTER_CALLS.format(calls))
        assert code in (-signal.SIGKILL, 0), recorded.output(tracker)  # code 0 if earlier processes had sent all steps
    assert recorded.track(tracker) == 0, recorded.output(tracker)
    found = sent(recorded.run, tracker, "reward")
    check_once_each(found, STEPS)
    assert [value for _, value in found] == pytest.approx([min(0.95, 0.1 + 0.07 * step) for step in range(1, 13)])
    check_once_each(sent(recorded.run, tracker, "rrl/seconds"), STEPS)
    assert read_progress(recorded.run, tracker).step == STEPS
    [(step, table)] = sent_tables(recorded.run, tracker)
    assert step == 10
    assert "answer" in table
    assert "10" in table


@pytest.mark.parametrize("tracker", TRACKERS)
def test_tracker_run_continues_after_the_end_and_a_resume(recorded: Recorded, tracker: str) -> None:
    recorded.story.ends(Outcome.FAILED, "rollout/0 failed too often")
    recorded.write()
    assert recorded.track(tracker, UNTIL_END) == 0, recorded.output(tracker)
    assert read_progress(recorded.run, tracker).finished
    assert recorded.track(tracker, UNTIL_END) == 0, "a second process for a finished run fails"
    recorded.story.wait(100).record(ev.Resumed("anna", "1", recorded.story.job))
    recorded.set_job({"roles": {"trainer": {"learning_rate": 0.002}}})
    recorded.story.launches("trainer/0").joins("trainer/0", "train")
    for step in (13, 14):
        recorded.story.commits(step)
    recorded.story.ends(Outcome.COMPLETED, "all steps are done")
    recorded.write()
    assert recorded.track(tracker, UNTIL_END) == 0, recorded.output(tracker)
    check_once_each(sent(recorded.run, tracker, "reward"), 14)
    assert read_progress(recorded.run, tracker) == msgspec.structs.replace(
        read_progress(recorded.run, tracker), step=14, finished=True, error=""
    )


@pytest.mark.parametrize("tracker", TRACKERS)
def test_following_process_sends_new_steps_and_ends_on_sigterm(recorded: Recorded, tracker: str) -> None:
    process = recorded.start(tracker, FOLLOW)
    recorded.story.clocks("trainer/0", train=30.0)
    recorded.write()
    wait_until(lambda: read_progress(recorded.run, tracker).step == STEPS)
    recorded.story.commits(13).clocks("trainer/0", train=33.0)
    recorded.write()
    wait_until(lambda: read_progress(recorded.run, tracker).step == 13)
    recorded.story.commits(14).clocks("trainer/0", train=36.0)
    recorded.write()
    process.terminate()
    assert exit_code(process) == 0, recorded.output(tracker)
    check_once_each(sent(recorded.run, tracker, "reward"), 14)


def test_mlflow_gets_the_rest_of_a_step_whose_metrics_were_written_in_part(recorded: Recorded) -> None:
    recorded.story.clocks("trainer/0", train=30.0)
    recorded.write()
    program = """
import os, signal, sys
from mlflow.store.tracking.file_store import FileStore
from rrl.manager.tracking import main
written, log = [], FileStore._log_run_metric
def count(self, run, metric):
    log(self, run, metric)
    written.append(metric)
    if len(written) == 17:
        os.kill(os.getpid(), signal.SIGKILL)
FileStore._log_run_metric = count
sys.exit(main.main())
"""
    for _ in range(3):
        assert recorded.track("mlflow", ONCE, program) == -signal.SIGKILL
    assert recorded.track("mlflow") == 0
    for metric in ("reward", "loss", "entropy", "rrl/seconds", "rrl/failures", "rrl/seconds_train", "rrl/step"):
        check_once_each(sent(recorded.run, "mlflow", metric), STEPS)


def test_job_failures_and_end_are_sent_without_values_of_the_environment(recorded: Recorded) -> None:
    secret = "sk-1234"
    recorded.set_job(
        {
            "run": {"name": "small"},
            "env": {"setup": [f"export KEY={secret}"], "passed": ["WANDB_API_KEY"]},
            "roles": {"trainer": {"env": {"KEY": secret}, "learning_rate": 0.001}},
        }
    )
    recorded.story.commits(13)
    recorded.story.ends(Outcome.FAILED, "rollout/0 failed too often")
    recorded.write()
    for tracker in TRACKERS:
        assert recorded.track(tracker, UNTIL_END, WANDB_API_KEY="wandb-5678") == 0, recorded.output(tracker)
    files = [path for path in recorded.run.path.rglob("*") if path.is_file() and not path.is_symlink()]
    leaking = [path for path in files if {secret, "wandb-5678"} & set(_words(path)) and path != recorded.run.resolved]
    assert leaking == []

    client, [run_id] = mlflow_runs(recorded.run.trackers / "mlflow")
    run = client.get_run(run_id)
    assert (run.info.status, run.data.params["roles.trainer.learning_rate"]) == ("FAILED", "0.001")
    assert run.data.params["roles.trainer.env.KEY"] == HIDDEN
    assert "failure: rollout/0#1: killed by signal 9" in run.data.tags["rrl.marks.00000013"]
    assert run.data.tags["rrl.end"] == "ended: run: failed: rollout/0 failed too often"

    texts = "".join(path.read_text(errors="replace") for path in (recorded.run.trackers / "tensorboard").iterdir())
    assert "learning_rate" in texts
    assert "failure: rollout/0#1" in texts
    assert "failed: rollout/0 failed too often" in texts
    texts = "".join(path.read_text(errors="replace") for path in recorded.run.trackers.rglob("*.wandb"))
    assert "learning_rate" in texts
    assert "failure: rollout/0#1" in texts


def _words(path: Path) -> set[str]:
    content = path.read_bytes()
    return {word for word in ("sk-1234", "wandb-5678") if word.encode() in content}


def test_step_with_a_torn_record_at_the_end_of_an_event_file_is_sent_again(recorded: Recorded) -> None:
    recorded.story.clocks("trainer/0", train=30.0)
    recorded.write()
    assert recorded.track("tensorboard") == 0
    [file] = (recorded.run.trackers / "tensorboard").iterdir()
    os.truncate(file, file.stat().st_size - 20)
    assert recorded.track("tensorboard") == 0
    check_once_each(tensorboard_scalars(file.parent, "reward"), STEPS)


def test_a_call_that_hangs_ends_the_process_after_the_timeout_of_the_job(
    tmp_path: Path, server: ForkServerContext
) -> None:
    job = msgspec.structs.replace(job_view(steps=40), track=TrackSpec(timeout=1.0))
    recorded = Recorded(tmp_path, Story("small-1120-064114", job).works(), server)
    recorded.story.clocks("trainer/0", train=30.0)
    recorded.write()
    program = """
import sys, time
from rrl.manager.tracking import main
class HangingTracker:
    newest_step, place = 0, ""
    def send(self, row): time.sleep(1000)
main.open_tracker = lambda *_: HangingTracker()
sys.exit(main.main())
"""
    assert recorded.track("tensorboard", ONCE, program) == HUNG_EXIT


def test_a_tracker_that_refuses_ends_the_process_with_its_reason(recorded: Recorded) -> None:
    recorded.story.clocks("trainer/0", train=30.0)
    recorded.write()
    assert recorded.track("mlflow", MLFLOW_TRACKING_URI="nonsense://x") == 1
    assert "nonsense" in read_progress(recorded.run, "mlflow").error
    assert "\n" not in read_progress(recorded.run, "mlflow").error


def test_a_second_process_for_a_tracker_exits_while_the_first_one_runs(recorded: Recorded) -> None:
    lock = os.open(recorded.run.trackers / "tensorboard.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert recorded.track("tensorboard") == LOCKED_EXIT
    follower = recorded.start("tensorboard", FOLLOW)
    recorded.story.clocks("trainer/0", train=30.0)
    recorded.write()
    os.close(lock)
    wait_until(lambda: read_progress(recorded.run, "tensorboard").step == STEPS)
    follower.terminate()
    assert exit_code(follower) == 0


def test_children_of_a_killed_process_are_ended_before_the_next_one_opens(recorded: Recorded) -> None:
    env = {**os.environ, "RRL_TRACKER": f"{recorded.run.path}/tensorboard"}
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], env=env)
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)"],
        env={**env, "RRL_TRACKER": f"{recorded.run.path}/wandb"},
    )
    recorded.write()
    assert recorded.track("tensorboard") == 0
    assert left.wait(TIMEOUT_S) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_unreadable_progress_counts_as_no_progress(recorded: Recorded) -> None:
    (recorded.run.trackers / "wandb.json").write_text(json.dumps({"step": "x"}))
    assert read_progress(recorded.run, "wandb") == Progress()
