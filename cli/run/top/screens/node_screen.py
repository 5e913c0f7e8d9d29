"""The screen of one node: what runs there, the evidence against it, its drain, and the decisions about it."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from .....core.run_dir import RunDir
from .....core.types import NodeName
from ....common.output import Escaped
from ..changes import CHANGES, is_possible
from ..details import missing_view, node_view
from ..run_feed import RunFeed, Snapshot
from .explanation_screen import ExplanationScreen
from .fault_screen import FaultScreen
from .opened_screen import OpenedScreen


class NodeScreen(OpenedScreen):
    """A node of a run.

    Args:
        feed: The runs.
        run: The run.
        node: The node.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back", tooltip="Go back to the previous screen"),
        Binding("e", "explain", "Explain", tooltip="Explain the decisions about this node"),
        Binding("d", "drain", "Drain", tooltip="Drain this node"),
        Binding("i", "inject", "Inject", tooltip="Inject a fault into this node, if the job allows it"),
    ]

    def __init__(self, feed: RunFeed, run: RunDir, node: NodeName) -> None:
        super().__init__(feed, run)
        self._shown = node

    def compose(self) -> ComposeResult:
        """Create the view and the footer."""
        with VerticalScroll(id="page"):
            yield Static(id="view")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Show the node after each reading."""
        self._feed.changed.subscribe(self, self._show)
        self.query_one("#page").focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible now."""
        state = self._state
        if action in CHANGES and state is not None and self._node not in state.nodes:
            return False
        return is_possible(action, state, None, self._node)

    def action_explain(self) -> None:
        """Explain the decisions about the node."""
        self.app.push_screen(ExplanationScreen(self._run_dir, self._node))

    def action_inject(self) -> None:
        """Let the user describe a fault of the node."""
        if self._opened is not None and self._state is not None:
            self.app.push_screen(FaultScreen(self._opened.watched, self._state, self._node))

    @property
    def _node(self) -> NodeName:
        return self._shown

    def _show(self, snapshot: Snapshot) -> None:
        if not self.is_current or snapshot.opened is None:
            return
        self._opened, state = snapshot.opened, snapshot.opened.watched.state
        if state is not None:
            node = state.nodes.get(self._node)
            view = (
                missing_view(self._node, sorted(state.nodes))
                if node is None
                else node_view(state, node, self._feed.now())
            )
            self.query_one("#view", Static).update(Escaped(view))
        self._keys.refresh()
