"""The screen of one run: what ``rrl status`` shows, and the tables of its replicas and nodes."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import ScreenResume
from textual.widgets import Footer, Static, TabbedContent, TabPane

from .....core.types import NodeName, ReplicaId, gang_of
from .....manager.model.state import State
from ....common.output import Escaped
from ....views.replicas import REPLICA_COLUMNS
from ....views.status import facts_view, failures_now, known_until, troubles_view
from ..changes import CHANGES, ChangeRequested, is_possible, restart_of
from ..details import NODE_COLUMNS, node_rows, replica_rows
from ..run_feed import OpenedRun, Snapshot
from ..widgets.list_table import ListTable
from .explanation_screen import ExplanationScreen
from .fault_screen import FaultScreen
from .node_screen import NodeScreen
from .opened_screen import OpenedScreen
from .replica_screen import ReplicaScreen


class RunScreen(OpenedScreen):
    """A run. The keys act on the replica or node that has the cursor.

    Args:
        feed: The runs.
        run: The run.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back", tooltip="Go back to the previous screen"),
        Binding("n", "switch", "Nodes", show=False, tooltip="Switch between the tables of replicas and of nodes"),
        Binding("e", "explain", "Explain", tooltip="Explain the decisions about the replica or node with the cursor"),
        Binding("E", "explain_run", "Explain run", show=False, tooltip="Explain all decisions of the run"),
        Binding("r", "restart", "Restart", tooltip="Restart the replica that has the cursor"),
        Binding("d", "drain", "Drain", tooltip="Drain the node under the cursor, or the replica's node"),
        Binding("i", "inject", "Inject", tooltip="Inject a fault, if the job allows it"),
    ]

    def compose(self) -> ComposeResult:
        """Create the view of the run, the two tables and the footer."""
        with VerticalScroll(id="facts"):
            yield Static(id="view")
        with TabbedContent(id="tables"):
            with TabPane("Replicas", id="replicas"):
                yield ListTable(REPLICA_COLUMNS, id="replica-table")
            with TabPane("Nodes (n)", id="nodes"):
                yield ListTable(NODE_COLUMNS, id="node-table")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Show the run after each reading."""
        self._feed.changed.subscribe(self, self._show)
        self.query_one("#facts").can_focus = False
        self._table.focus_table()

    @on(ScreenResume)
    def _open_run(self) -> None:  # before the newest reading is shown
        self._feed.open(self._run_dir)

    @on(TabbedContent.TabActivated)
    def _table_chosen(self) -> None:
        if (state := self._state) is not None:
            self._show_table(state, self._feed.now())
        self._table.focus_table()
        self.refresh_bindings()

    @on(ListTable.Opened)
    def _row_opened(self, event: ListTable.Opened) -> None:
        if event.table.id == "replica-table":
            self.app.push_screen(ReplicaScreen(self._feed, self._run_dir, ReplicaId(event.key)))
        else:
            self.app.push_screen(NodeScreen(self._feed, self._run_dir, NodeName(event.key)))

    # ── actions ────────────────────────────────────────────────────────────────────────────────────────────────────
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible for the run and for the row that has the cursor."""
        if action not in CHANGES or self._state is None:  # the tables may not exist yet
            return action not in CHANGES
        return is_possible(action, self._state, self._replica, self._node)

    def action_switch(self) -> None:
        """Switch between the two tables."""
        tables = self.query_one(TabbedContent)
        tables.active = "nodes" if tables.active == "replicas" else "replicas"

    def action_explain(self) -> None:
        """Explain the decisions about the replica or node that has the cursor."""
        replica = self._replica
        about = self._table.cursor_key if replica is None else gang_of(replica)
        self.app.push_screen(ExplanationScreen(self._run_dir, about))

    def action_explain_run(self) -> None:
        """Explain all decisions of the run."""
        self.app.push_screen(ExplanationScreen(self._run_dir, None))

    def action_restart(self) -> None:
        """Ask whether to restart the replica that has the cursor."""
        if self._opened is not None and self._state is not None and self._replica is not None:
            self.post_message(ChangeRequested(restart_of(self._opened.watched, self._state, self._replica)))

    def action_inject(self) -> None:
        """Let the user describe a fault for the replica or node that has the cursor."""
        if self._opened is not None and self._state is not None:
            target = self._replica or self._node or ""
            self.app.push_screen(FaultScreen(self._opened.watched, self._state, target))

    # ── what the cursor is on ──────────────────────────────────────────────────────────────────────────────────────
    @property
    def _table(self) -> ListTable:
        active = self.query_one(TabbedContent).active or "replicas"
        return self.query_one("#replica-table" if active == "replicas" else "#node-table", ListTable)

    @property
    def _replica(self) -> ReplicaId | None:
        """The replica that has the cursor; None in the table of nodes."""
        key = self._table.cursor_key
        return ReplicaId(key) if key is not None and self._table.id == "replica-table" else None

    @property
    def _node(self) -> NodeName | None:
        """The node that has the cursor, or the node of the replica that has the cursor."""
        key, state = self._table.cursor_key, self._state
        if key is None or state is None:
            return None
        return state.replica(ReplicaId(key)).node if self._table.id == "replica-table" else NodeName(key)

    # ── drawing ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _show(self, snapshot: Snapshot) -> None:
        opened, path = snapshot.opened, self._run_dir.path
        if not self.is_current:
            return
        if opened is None or opened.watched.run.path != path:  # the run is gone, or was opened during the reading
            if all(one.run.path != path for one in snapshot.runs):
                self._show_missing(snapshot.trouble)
            return
        now, view = self._feed.now(), self.query_one("#view", Static)
        self._opened, state = opened, opened.watched.state
        if state is None:
            view.update(Escaped(Text(f"{self._run_dir.id}: {opened.waiting}", "yellow", overflow="fold")))
        else:
            view.update(Escaped(_run_view(opened, state, now, max(20, self.size.width - 4))))
            self._show_table(state, now)
        self._keys.refresh()

    def _show_table(self, state: State, now: float) -> None:
        """Update the visible table."""
        table = self._table
        if table.id == "node-table":
            table.show(node_rows(state, now))
            return
        notes = (self._opened.liveness.note,) if self._opened is not None else ()
        table.show(replica_rows(state, known_until(state, now, notes), failures_now(state, now)))

    def _show_missing(self, trouble: str) -> None:
        self._opened = None
        reason = trouble or f"{self._run_dir.path} is no longer there"
        self.query_one("#view", Static).update(Escaped(Text(reason, "red", overflow="fold")))
        for table in self.query(ListTable):
            table.show([])
        self._keys.refresh()


def _run_view(opened: OpenedRun, state: State, now: float, width: int) -> RenderableType:
    """Return the view of ``rrl status`` without the table of replicas, which is shown below it."""
    liveness, files = opened.liveness, opened.files
    notes = (liveness.note, liveness.advice)
    facts = facts_view(state, now, width, notes, liveness.standing, files.folders)
    troubles = troubles_view(state, now, failures_now(state, now)) if state.outcome is None else []
    return Group(facts, *troubles, *files.views())
