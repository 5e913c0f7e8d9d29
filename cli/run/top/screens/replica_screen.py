"""The screen of one replica: its phases, its GPUs, what was found about it, and the end of its log."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, RichLog, Static
from textual.worker import get_current_worker

from .....api.logs.files import Log
from .....api.logs.log_reader import LogReader, line_filter
from .....api.logs.merge import Line
from .....core.run_dir import RunDir
from .....core.text import escaped
from .....core.types import NodeName, OperationFailed, ReplicaId, UsageError, gang_of
from ....common.output import Escaped
from ....logs.printer import Printer
from ....views.status import failures_now
from ..changes import ChangeRequested, is_possible, restart_of
from ..details import missing_view, replica_view
from ..run_feed import RunFeed, Snapshot
from .explanation_screen import ExplanationScreen
from .fault_screen import FaultScreen
from .opened_screen import OpenedScreen

FIRST_LINES = 200
"""Number of the newest lines of each log that are shown at first."""
MAX_LINES = 2000
"""Maximum number of lines that are kept: older lines are in the file, for ``rrl logs``."""
MAX_LINES_AT_ONCE = 500
"""Maximum number of lines that are added to the view at once. If one reading of the logs returns more lines, only the
newest are shown, since people cannot read more."""


class LogTail(RichLog):
    """The logs that ``rrl logs RUN SELECTOR -f`` follows.

    Args:
        run: The run.
        selector: The replica.
    """

    def __init__(self, run: RunDir, selector: str) -> None:
        super().__init__(max_lines=MAX_LINES, wrap=True, markup=False, highlight=False)
        self._run_dir, self._selector = run, selector

    def on_mount(self) -> None:
        """Begin to read."""
        self._follow()

    @work(thread=True)
    def _follow(self) -> None:
        worker, printer = get_current_worker(), Printer(json=False, raw=False)
        try:
            reader = LogReader(self._run_dir, self._selector, line_filter(FIRST_LINES, None, None), follow=True)
            for batch in reader.batches():
                lines = [_text(printer, log, line) for log, line in batch]
                if worker.is_cancelled:
                    return
                if lines:
                    self.app.call_from_thread(self._append, lines[-MAX_LINES_AT_ONCE:])
        except (UsageError, OperationFailed, OSError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            if not worker.is_cancelled:
                self.app.call_from_thread(self._append, [Text(escaped(reason), "yellow")])

    def _append(self, lines: Sequence[Text]) -> None:
        at_end = self.is_vertical_scroll_end
        for line in lines:
            self.write(line, scroll_end=at_end)


def _text(printer: Printer, log: Log, line: Line) -> Text:
    """Return a line with its local time and the process that wrote it."""
    at = f"{printer.local_time(line.stamp)} " if line.stamp else ""
    text = escaped(line.text.decode("utf-8", "replace"))
    return Text.assemble((at, "bright_black"), (f"{log.label} ", "cyan"), text.replace("\t", "    "))


class ReplicaScreen(OpenedScreen):
    """A replica of a run.

    Args:
        feed: The runs.
        run: The run.
        replica: The replica, or one rank of a gang.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back", tooltip="Go back to the previous screen"),
        Binding("e", "explain", "Explain", tooltip="Explain the decisions about this replica"),
        Binding("r", "restart", "Restart", tooltip="Restart this replica"),
        Binding("d", "drain", "Drain", tooltip="Drain the node of this replica"),
        Binding("i", "inject", "Inject", tooltip="Inject a fault into this replica, if the job allows it"),
    ]

    def __init__(self, feed: RunFeed, run: RunDir, replica: ReplicaId) -> None:
        super().__init__(feed, run)
        self._replica = replica

    def compose(self) -> ComposeResult:
        """Create the view, the log and the footer."""
        with VerticalScroll(id="facts"):
            yield Static(id="view")
        yield LogTail(self._run_dir, self._replica)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Show the replica after each reading."""
        self._feed.changed.subscribe(self, self._show)
        self.query_one(LogTail).focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible now."""
        return is_possible(action, self._state, self._replica, self._node)

    def action_explain(self) -> None:
        """Explain the decisions about the replica."""
        self.app.push_screen(ExplanationScreen(self._run_dir, gang_of(self._replica)))

    def action_restart(self) -> None:
        """Ask whether to restart the replica."""
        if self._opened is not None and self._state is not None:
            self.post_message(ChangeRequested(restart_of(self._opened.watched, self._state, self._replica)))

    def action_inject(self) -> None:
        """Let the user describe a fault of the replica."""
        if self._opened is not None and self._state is not None:
            self.app.push_screen(FaultScreen(self._opened.watched, self._state, self._replica))

    @property
    def _node(self) -> NodeName | None:
        return None if self._state is None else self._state.replica(self._replica).node

    def _show(self, snapshot: Snapshot) -> None:
        if not self.is_current or snapshot.opened is None:
            return
        self._opened, state = snapshot.opened, snapshot.opened.watched.state
        if state is not None:
            now, replica = self._feed.now(), state.replicas.get(self._replica)
            names = [one.id for one in state.workers]
            view = (
                missing_view(self._replica, names)
                if replica is None
                else replica_view(state, replica, now, failures_now(state, now))
            )
            self.query_one("#view", Static).update(Escaped(view))
        self._keys.refresh()
