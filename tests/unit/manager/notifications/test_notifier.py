"""Notifications are really sent to commands and an HTTP server, and never twice, even if managers die."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.core.run_dir import RunDir
from rrl.core.run_spec import NotificationKind
from rrl.core.types import NodeName, Outcome
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Drain, Exclude, Why
from rrl.manager.model.state import State
from rrl.manager.model.table import as_dict
from rrl.manager.notifications import notifier as notifying
from rrl.manager.notifications.conditions import LIMIT_S, conditions
from rrl.manager.notifications.notifier import Notifier
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.cli.waiting import eventually

KINDS: tuple[NotificationKind, ...] = ("failed", "degraded", "stalled", "completed", "drain")
SECRET = "s3cr3t"
N3 = NodeName("n3")
QUICK_S = 0.02
"""Interval between two looks at the state (s)."""


@pytest.fixture
def story() -> Story:
    return ended()


def ended(outcome: Outcome = Outcome.FAILED, kinds: tuple[NotificationKind, ...] = KINDS) -> Story:
    story = Story(job=msgspec.structs.replace(job_view(), notify=kinds))
    return story.works().ends(outcome, "its nodes are gone")


def recorded(story: Story, root: Path, target: str) -> RunDir:
    """Return the run directory of a story whose job.toml has this target."""
    run = RunDir(root / "runs" / story.run)
    run.create()
    (root / "job.toml").write_text(f"[notify]\n{target}\n")
    run.job_toml.write_bytes((root / "job.toml").read_bytes())
    run.resolved.write_text(json.dumps({"source": str(root / "job.toml")}))
    return run


def to_file(root: Path, before: str = "") -> str:
    """Return a command that appends its input to ``received``, in the folder of job.toml."""
    script = root / "notify.sh"
    script.write_text(f"#!/bin/sh\n{before}\n{{ cat; echo; }} >> received\n")
    script.chmod(0o755)
    return 'command = ["./notify.sh"]'


def received(root: Path) -> list[dict[str, Any]]:
    path = root / "received"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Managed:
    """A notifier of one manager.

    A test may change ``state``, ``now`` and ``durable``, the number of the newest durable record.
    """

    def __init__(self, run: RunDir, state: State, now: float | None = None) -> None:
        self.state, self.durable, self.now = state, state.seq, state.at if now is None else now
        self.looks = 0
        self.notifier = Notifier(run, lambda: self.state, self._durable_seq, lambda: self.now, QUICK_S)

    def _durable_seq(self) -> int:
        self.looks += 1
        return self.durable

    def looks_again(self, times: int = 3) -> None:
        """Wait until the notifier has read the state ``times`` more times, and has sent all due notifications."""
        until = self.looks + times
        eventually(lambda: self.looks >= until)


@contextmanager
def managed(run: RunDir, story: Story, now: float | None = None) -> Iterator[Managed]:
    manager = Managed(run, story.recorded(), now)
    try:
        yield manager
    finally:
        manager.notifier.close()


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_command_gets_the_message_as_json_in_the_folder_of_the_job(tmp_path: Path, story: Story) -> None:
    run = recorded(story, tmp_path, to_file(tmp_path))
    with managed(run, story):
        eventually(lambda: received(tmp_path))
    (message,) = received(tmp_path)
    assert message == {
        "text": f"rrl {run.id} failed: its nodes are gone",
        "kind": "failed",
        "run": run.id,
        "name": "small",
        "details": ["its nodes are gone"],
        "step": 12,
        "steps": 40,
        "time": story.now,
        "run_dir": str(run.path),
    }


def test_only_the_kinds_that_the_job_names_are_sent(tmp_path: Path) -> None:
    story = ended(kinds=("completed", "drain"))
    with managed(recorded(story, tmp_path, to_file(tmp_path)), story) as manager:
        manager.looks_again()
    assert received(tmp_path) == []


def test_nothing_is_sent_before_its_record_is_durable(tmp_path: Path, story: Story) -> None:
    with managed(recorded(story, tmp_path, to_file(tmp_path)), story) as manager:
        eventually(lambda: received(tmp_path))
        manager.durable = 0
        story.wait(2 * LIMIT_S)
        manager.state, manager.now = ended_again(story), story.now
        manager.looks_again()
        assert len(received(tmp_path)) == 1
        manager.durable = manager.state.seq
        eventually(lambda: len(received(tmp_path)) == 2)


def ended_again(story: Story) -> State:
    story.record(ev.Resumed("ada", f"r{story.at}", story.job)).ends(Outcome.FAILED, "again")
    return story.recorded()


def test_at_most_one_of_a_kind_is_sent_in_an_hour(tmp_path: Path, story: Story) -> None:
    with managed(recorded(story, tmp_path, to_file(tmp_path)), story) as manager:
        eventually(lambda: received(tmp_path))
        story.wait(LIMIT_S / 2)
        manager.state, manager.now = ended_again(story), story.now
        manager.durable = manager.state.seq
        manager.looks_again()
        assert len(received(tmp_path)) == 1
        manager.now += LIMIT_S / 2 + 1  # the run is still ended, and its second end is less than an hour old
        eventually(lambda: len(received(tmp_path)) == 2)
        manager.now += 1e6
        manager.looks_again()
    assert [one["details"] for one in received(tmp_path)] == [["its nodes are gone"], ["again"]]


def test_lasting_condition_is_sent_once(tmp_path: Path) -> None:
    story = Story(job=msgspec.structs.replace(job_view(), notify=KINDS)).works()
    drain = Drain(N3, "rrl:small:gpu: Xid 79", Why(("xid: Xid 79",)))
    story.record(ev.Decided(Exclude(N3, Why(("xid: Xid 79",)))), ev.Intended(drain), ev.IntentSettled(drain.tag, True))
    with managed(recorded(story, tmp_path, to_file(tmp_path)), story) as manager:
        eventually(lambda: received(tmp_path))
        manager.now += 2 * LIMIT_S
        manager.looks_again()
    assert [one["details"] for one in received(tmp_path) if one["kind"] == "drain"] == [["n3 is drained: xid: Xid 79"]]


def test_different_kinds_do_not_wait_for_each_other(tmp_path: Path) -> None:
    story = ended(Outcome.COMPLETED)
    with managed(recorded(story, tmp_path, to_file(tmp_path)), story) as manager:
        eventually(lambda: received(tmp_path))
        manager.state = ended_again(story)
        manager.durable, manager.now = manager.state.seq, story.now
        eventually(lambda: len(received(tmp_path)) == 2)
    assert [one["kind"] for one in received(tmp_path)] == ["completed", "failed"]


def test_end_of_the_run_is_sent_before_the_manager_exits(tmp_path: Path, story: Story) -> None:
    run = recorded(story, tmp_path, to_file(tmp_path))
    manager = Notifier(run, story.recorded, lambda: story.recorded().seq, lambda: story.now, check_interval_s=3600.0)
    manager.close()
    assert [one["kind"] for one in received(tmp_path)] == ["failed"]


# ── failed notifications ─────────────────────────────────────────────────────────────────────────────────────────────
def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (f'command = ["/bin/sh", "-c", "echo {SECRET} >&2; exit 7"]', "the command ended with exit code 7"),
        (f'command = ["./missing", "{SECRET}"]', '"./missing" cannot be started: No such file or directory'),
        (f'command = ["/bin/sh", "-c", "kill -9 $$ # {SECRET}"]', "the command was ended by signal 9"),
        (f'webhook = "http://127.0.0.1:9/{SECRET}"', "cannot be reached: [Errno 111] Connection refused"),
        ("", "has no table [notify] with command or webhook"),
    ],
)
def test_failed_notification_is_logged_in_one_line_and_not_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str, reason: str, story: Story
) -> None:
    with managed(recorded(story, tmp_path, target), story) as manager:
        eventually(lambda: warnings(caplog))
        manager.looks_again()
    (line,) = warnings(caplog)
    assert line.startswith('notification "failed" was not sent: ')
    assert line.endswith(reason)
    assert SECRET not in caplog.text


def test_hung_command_is_killed_and_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifying, "SEND_TIMEOUT_S", 2.0)
    story = ended()
    hangs = "echo $$ > pid; sleep 1000 & wait"
    run = recorded(story, tmp_path, to_file(tmp_path, hangs))
    with managed(run, story) as manager:
        eventually(lambda: warnings(caplog))
        manager.looks_again()
    assert warnings(caplog) == ['notification "failed" was not sent within 2 s, and is given up']
    if (tmp_path / "pid").exists():  # on a busy machine the command may not have begun
        pid = int((tmp_path / "pid").read_text())
        eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert received(tmp_path) == []


def test_unwritable_folder_of_claims_is_logged_in_one_line_and_nothing_is_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, story: Story
) -> None:
    run = recorded(story, tmp_path, to_file(tmp_path))
    run.notifications.write_text("a file where the folder of claims should be")
    with managed(run, story) as manager:
        eventually(lambda: warnings(caplog))
        manager.looks_again(10)
        assert received(tmp_path) == []
        assert len(warnings(caplog)) == 1
        run.notifications.unlink()
        eventually(lambda: received(tmp_path))
    assert len(received(tmp_path)) == 1


# ── webhooks ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Server(ThreadingHTTPServer):
    """A web server that stores the requests that are posted to it."""

    daemon_threads = True

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.posted: list[tuple[str, dict[str, str], bytes]] = []
        self.answer = answer
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/services/{SECRET}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, dict(self.headers), body))
        self.server.answer(self)

    def do_GET(self) -> None:
        self.server.posted.append((f"GET {self.path}", {}, b""))
        self.server.answer(self)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Server]:
    with Server(answer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _answers(code: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def test_webhook_gets_the_message_as_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rrl.manager")
    story = ended()
    with serving(_answers(204)) as server:
        with managed(recorded(story, tmp_path, f'webhook = "{server.url}"'), story):
            eventually(lambda: "was sent" in caplog.text)
    ((path, headers, body),) = server.posted
    assert (path, headers["Content-Type"]) == (f"/services/{SECRET}", "application/json")
    assert json.loads(body)["text"] == f"rrl {story.run} failed: its nodes are gone"
    assert SECRET not in caplog.text


@pytest.mark.parametrize("code", [302, 404, 500])
def test_webhook_that_refuses_is_logged_in_one_line_without_its_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int, story: Story
) -> None:
    with serving(_answers(code, Location="/elsewhere")) as server:
        with managed(recorded(story, tmp_path, f'webhook = "{server.url}"'), story) as manager:
            eventually(lambda: warnings(caplog))
            manager.looks_again()
        assert len(server.posted) == 1, "the request was repeated or redirected"
    assert warnings(caplog) == [f'notification "failed" was not sent: the webhook at 127.0.0.1 answered {code}']


def _wait(over: threading.Event) -> None:
    over.wait(60)


def test_webhook_that_never_answers_is_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifying, "SEND_TIMEOUT_S", 2.0)
    story, over = ended(), threading.Event()
    with serving(lambda _: _wait(over)) as server:
        with managed(recorded(story, tmp_path, f'webhook = "{server.url}"'), story) as manager:
            eventually(lambda: warnings(caplog))
            manager.looks_again()
        over.set()
    assert warnings(caplog) == ['notification "failed" was not sent within 2 s, and is given up']


# ── killed managers ──────────────────────────────────────────────────────────────────────────────────────────────────
_MORTAL_MANAGER = """
import os, signal, sys, time
from pathlib import Path
import msgspec
from rrl.core.run_dir import RunDir
from rrl.manager.model.state import State
from rrl.manager.notifications import claims, notifier

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

run, state = RunDir(Path(sys.argv[1])), msgspec.msgpack.decode(Path(sys.argv[2]).read_bytes(), type=State)
if sys.argv[3] == "before the claim":
    claims.Claims.add = die
elif sys.argv[3] == "between claim and sending":
    notifier.Notifier._send = die
notifier.Notifier(run, lambda: state, lambda: state.seq, lambda: state.at, 0.02)
time.sleep(600)
"""


def mortal_manager(run: RunDir, story: Story, root: Path, moment: str) -> subprocess.Popen[bytes]:
    """Start a manager in a process of its own, which kills itself with SIGKILL at ``moment``."""
    state = root / "state"
    state.write_bytes(msgspec.msgpack.encode(story.recorded(), enc_hook=as_dict))
    return subprocess.Popen([sys.executable, "-c", _MORTAL_MANAGER, str(run.path), str(state), moment])


def test_notification_claimed_by_a_manager_that_died_is_not_sent_later(tmp_path: Path, story: Story) -> None:
    run = recorded(story, tmp_path, to_file(tmp_path))
    assert mortal_manager(run, story, tmp_path, "between claim and sending").wait(60) == -signal.SIGKILL
    assert [path.name for path in run.notifications.iterdir()] == ["failed-1.json"]
    with managed(run, story, story.now + 2) as manager:
        manager.looks_again()
        assert received(tmp_path) == []
        story.wait(2 * LIMIT_S)
        manager.state, manager.now = ended_again(story), story.now
        manager.durable = manager.state.seq
        eventually(lambda: received(tmp_path))
    assert [one["details"] for one in received(tmp_path)] == [["again"]], "not exactly the next occurrence was sent"


def test_condition_that_a_dead_manager_did_not_claim_is_sent_once_by_the_next_one(tmp_path: Path, story: Story) -> None:
    run = recorded(story, tmp_path, to_file(tmp_path))
    assert mortal_manager(run, story, tmp_path, "before the claim").wait(60) == -signal.SIGKILL
    assert received(tmp_path) == []
    for _ in range(2):
        with managed(run, story, story.now + 2) as manager:
            eventually(lambda: received(tmp_path))
            manager.looks_again()
    assert [one["kind"] for one in received(tmp_path)] == ["failed"]


def test_manager_that_dies_while_a_notification_is_sent_does_not_send_it_twice(tmp_path: Path, story: Story) -> None:
    run = recorded(story, tmp_path, to_file(tmp_path, "touch begun; while [ ! -e go ]; do sleep 0.05; done"))
    manager = mortal_manager(run, story, tmp_path, "never")
    eventually(lambda: (tmp_path / "begun").exists())
    os.kill(manager.pid, signal.SIGKILL)
    manager.wait(60)
    (tmp_path / "go").touch()
    with managed(run, story, story.now + 2) as successor:
        eventually(lambda: received(tmp_path))
        successor.looks_again()
    assert len(received(tmp_path)) == 1


def test_claim_whose_writer_died_counts_for_an_hour(tmp_path: Path, story: Story) -> None:
    run = recorded(story, tmp_path, to_file(tmp_path))
    run.notifications.mkdir()
    torn = run.notifications / "failed-1.json"
    torn.write_bytes(b'{"kind":"fai')
    os.utime(torn, (story.now, story.now))
    with managed(run, story, story.now + LIMIT_S / 2) as manager:
        manager.looks_again()
        assert received(tmp_path) == []


def test_two_managers_at_once_send_one_notification(tmp_path: Path, story: Story) -> None:
    """The first manager is frozen after it has read the claims. The second one writes its claim during that time."""
    run = recorded(story, tmp_path, to_file(tmp_path))
    frozen = Notifier(run, lambda: None, lambda: 0, lambda: story.now, QUICK_S)
    frozen._claims.load()
    with managed(run, story):
        eventually(lambda: received(tmp_path))
    held = conditions(story.recorded(), story.now, None)
    assert not frozen._claim("failed", held, story.now)
    frozen.close()
    assert len(received(tmp_path)) == 1
