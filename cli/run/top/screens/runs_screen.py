"""The first screen of ``rrl top``: all runs of this user in a table."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import ScreenResume
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Static

from .....api.watching.runs_watcher import WatchedRun
from .....core.run_dir import runs_root
from .....core.text import escaped
from ....views.summary import RUN_COLUMNS, run_cells
from ..run_feed import RunFeed, Snapshot
from ..widgets.list_table import ListTable, TableRow, by_number, by_text
from .explanation_screen import ExplanationScreen


class RunsScreen(Screen[None]):
    """A table of the runs, newest first until the user sorts it. Enter opens a run.

    Args:
        feed: The runs.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "explain", "Explain", tooltip="Explain the decisions of the run that has the cursor")
    ]

    class Opened(Message):
        """The user has opened a run."""

        def __init__(self, watched: WatchedRun) -> None:
            super().__init__()
            self.watched = watched

    def __init__(self, feed: RunFeed) -> None:
        super().__init__()
        self._feed = feed

    def compose(self) -> ComposeResult:
        """Create the line above the table, the table and the footer."""
        yield Static(id="title")
        yield ListTable(RUN_COLUMNS, id="runs")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Show the runs now and after each reading."""
        self._table.loading = self._feed.snapshot is None
        self._feed.changed.subscribe(self, self._show)
        self._table.focus_table()

    @on(ScreenResume)
    def _resumed(self) -> None:
        if not self.is_current:
            return
        self._feed.open(None)
        if self._feed.snapshot is not None:
            self._show(self._feed.snapshot)

    @on(ListTable.Opened)
    def _run_opened(self, event: ListTable.Opened) -> None:
        if (watched := self._watched(event.key)) is not None:
            self.post_message(self.Opened(watched))

    def action_explain(self) -> None:
        """Explain the decisions of the run that has the cursor."""
        if (watched := self._watched(self._table.cursor_key)) is not None:
            self.app.push_screen(ExplanationScreen(watched.run, None))

    @property
    def _table(self) -> ListTable:
        return self.query_one(ListTable)

    def _watched(self, key: str | None) -> WatchedRun | None:
        runs = self._feed.snapshot.runs if self._feed.snapshot is not None else ()
        return next((one for one in runs if str(one.run.path) == key), None)

    def _show(self, snapshot: Snapshot) -> None:
        if not self.is_current:
            return
        now = self._feed.now()
        self.query_one("#title", Static).update(_title(snapshot))
        self._table.loading = False
        self._table.show([_row(one, now) for one in snapshot.runs])


def _row(watched: WatchedRun, now: float) -> TableRow:
    entry = watched.entry
    keys = (
        by_text(entry.run),
        by_text(entry.standing),
        by_number(entry.step),
        by_number(entry.reward),
        by_number(entry.recoveries),
        by_number(entry.run_seconds),
        by_number(None if entry.started is None else now - entry.started),
    )
    return TableRow(str(watched.run.path), run_cells(entry, now), keys)


def _title(snapshot: Snapshot) -> Text:
    going_on = sum(one.state is not None and one.state.outcome is None for one in snapshot.runs)
    title = Text.assemble(("rrl top", "bold"), f"   {len(snapshot.runs)} runs in {_root_text()}")
    title.append(f", {going_on} not ended")
    if snapshot.trouble:
        title.append(f"   cannot be read now: {escaped(snapshot.trouble)}", "red")
    return title


def _root_text() -> str:
    """Return the folder of runs, with ``~`` for the user's home."""
    root, home = runs_root(), Path.home()
    return escaped(f"~/{root.relative_to(home)}" if root.is_relative_to(home) else str(root))
