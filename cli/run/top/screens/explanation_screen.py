"""The decisions of a run, as ``rrl explain`` shows them."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static
from textual.worker import get_current_worker

from .....core.run_dir import RunDir
from .....core.types import OperationFailed, UsageError
from ....common.output import Escaped
from ....results.explain import explanations, nothing_decided
from ....views.explanation import explanation_view

MAX_DECISIONS = 300
"""Maximum number of decisions that are shown. If there are more, only the newest are shown, because rendering all of
them would block the keyboard for a while."""


class ExplanationScreen(Screen[None]):
    """The decisions about a run, or only those about a role, replica or node; the newest is at the end.

    Args:
        run: The run.
        about: What the decisions are about; None for all.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back", tooltip="Go back to the previous screen"),
        Binding("e", "read_again", "Read again", tooltip="Read the decisions again, including newer ones"),
    ]

    def __init__(self, run: RunDir, about: str | None) -> None:
        super().__init__()
        self._run_dir, self._about = run, about

    def compose(self) -> ComposeResult:
        """Create the title, the page and the footer."""
        title = f"{self._run_dir.id}: decisions{f' about {self._about}' if self._about else ''}"
        yield Static(Escaped(Text(title, "bold")), id="title")
        with VerticalScroll(id="page"):
            yield Static(id="view")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Begin to read."""
        self.query_one("#page").focus()
        self.action_read_again()

    def action_read_again(self) -> None:
        """Read the whole journal once more."""
        self.query_one("#page").loading = True
        self._read()

    @work(thread=True, exclusive=True)
    def _read(self) -> None:
        worker = get_current_worker()
        view = _view(self._run_dir, self._about)
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show, view)

    def _show(self, view: RenderableType) -> None:
        page = self.query_one("#page", VerticalScroll)
        page.loading = False
        self.query_one("#view", Static).update(Escaped(view))
        page.scroll_end(animate=False)


def _view(run: RunDir, about: str | None) -> RenderableType:
    """Return the view of the decisions, or why there is none. Reads the journal."""
    try:
        found = explanations(run, about)
    except (UsageError, OperationFailed) as error:
        return Text(str(error), "yellow", overflow="fold")
    if not found:
        return Text(nothing_decided(run, about))
    shown = explanation_view(found[-MAX_DECISIONS:], grouped=about is None)
    if len(found) <= MAX_DECISIONS:
        return shown
    left_out = f"{len(found) - MAX_DECISIONS} older decisions are left out; rrl explain {run.id} has all of them"
    return Group(Text(left_out, "bright_black"), "", shown)
