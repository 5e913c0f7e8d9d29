"""Send the notifications that are due, from a thread of its own and by a child process for each.

Once a second the thread reads the newest state, so notifications do not delay the manager's loop. A state that is not
durable yet is ignored. For each kind, at most once an hour, the thread claims the conditions that hold and are not
claimed yet (``claims``). It then sends one notification about these conditions. A notification is never sent twice, and
it is not sent at all if the manager dies between claim and sending. A notification that fails or hangs only leads to
one line in the log.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...core.command_runner import run as run_command
from ...core.run_dir import RunDir
from ...core.run_spec import NotificationKind
from ...core.text import on_one_line
from ..model.state import State
from .claims import Claims
from .conditions import LIMIT_S, Condition, StallClock, conditions

_log = logging.getLogger("rrl.manager")

SENDER_MODULE = "rrl.manager.notifications.sender"
CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of the state."""
SEND_TIMEOUT_S = 30.0
"""Seconds until a child process that sends a notification is killed. Starting Python from shared storage can take some
seconds."""
END_TIMEOUT_S = SEND_TIMEOUT_S + 5.0
"""Seconds that a manager waits at the end of its run for the last notification."""
MAX_REASON_CHARS = 300
"""Maximum number of characters of the reason that is logged."""
LEAVE_TIMEOUT_S = 3.0
"""Seconds that a manager waits for a notification if it exits before the end of its run."""


class Notifier:
    """Sends the notifications of one manager.

    Args:
        run: The run.
        state: Returns the newest state, or None before the first record.
        durable_seq: Returns the number of the newest record that is durable.
        now: Returns the manager's time (s).
        check_interval_s: Seconds between two checks of the state.
    """

    def __init__(
        self,
        run: RunDir,
        state: Callable[[], State | None],
        durable_seq: Callable[[], int],
        now: Callable[[], float],
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        self._run, self._state, self._durable_seq, self._now = run, state, durable_seq, now
        self._interval_s = check_interval_s
        self._claims = Claims(run.notifications)
        self._loaded = False
        self._stall_clock = StallClock()
        self._storage_failed = False
        self._closing = threading.Event()
        # A daemon thread: if storage hangs, it must not keep the manager's process from exiting.
        self._thread = threading.Thread(target=self._loop, name="notifications", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Check the state once more, and wait for a limited time until everything is sent (blocking)."""
        state = self._state()
        ended = state is not None and state.outcome is not None
        self._closing.set()
        self._thread.join(END_TIMEOUT_S if ended else LEAVE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("a notification was still being sent when the manager exited")

    # ── in the thread ───────────────────────────────────────────────────────────────────────────────────────────────
    def _loop(self) -> None:
        last = False
        while not last:
            last = self._closing.wait(self._interval_s)
            try:
                self._check()
                self._storage_failed = False
            except OSError as error:
                if not self._storage_failed:
                    _log.warning("notifications cannot be claimed, so none is sent: %s", error.strerror or error)
                self._storage_failed = True

    def _check(self) -> None:
        state = self._state()
        if state is None or state.seq > self._durable_seq():
            return
        if not self._loaded:
            self._claims.load()
            self._loaded = True
        now = self._now()
        held = conditions(state, now, self._stall_clock.stalled_s(state, now))
        for kind in state.job.notify:
            due = [one for one in held if one.kind == kind]
            if due and self._claim(kind, due, now):
                self._send(kind, message(self._run, state, kind, due, now))

    def _claim(self, kind: NotificationKind, held: Sequence[Condition], now: float) -> bool:
        """Claim the conditions of a kind; return False if all are claimed, or the newest claim is too recent."""
        newest_at = self._claims.newest_at(kind)
        if newest_at is not None and now < newest_at + LIMIT_S:
            return False
        if all(self._claims.is_claimed(kind, one.key) for one in held):
            return False
        if self._claims.add(kind, now, [one.key for one in held], held[0].text):
            return True
        self._claims.load()
        return False

    def _send(self, kind: NotificationKind, document: dict[str, Any]) -> None:
        """Send a claimed notification; on failure log one line."""
        argv = (sys.executable, "-P", "-m", SENDER_MODULE, str(self._run.path))
        try:
            sent = run_command(argv, SEND_TIMEOUT_S, stdin_text=msgspec.json.encode(document).decode())
        except TimeoutError:
            _log.warning('notification "%s" was not sent within %g s, and is given up', kind, SEND_TIMEOUT_S)
        except OSError as error:
            _log.warning('notification "%s" was not sent: %s', kind, error.strerror or error)
        else:
            if sent.code == 0:
                _log.info('notification "%s" was sent', kind)
            else:
                reported = sent.err.strip().splitlines()[-1:]
                reason = on_one_line(reported[0])[:MAX_REASON_CHARS] if reported else _exit_text(sent.code)
                _log.warning('notification "%s" was not sent: %s', kind, reason)


def _exit_text(code: int) -> str:
    return f"the command ended with exit code {code}" if code > 0 else f"the command was ended by signal {-code}"


def message(run: RunDir, state: State, kind: NotificationKind, held: Sequence[Condition], now: float) -> dict[str, Any]:
    """Return the notification as a JSON document. ``text`` is one line, which chat services show as the message."""
    details = [on_one_line(one.text) for one in held]
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return {
        "text": f"rrl {run.id} {kind}: {details[0]}{more}",
        "kind": kind,
        "run": run.id,
        "name": state.job.name,
        "details": details,
        "step": state.step,
        "steps": state.job.steps,
        "time": now,
        "run_dir": str(run.path),
    }
