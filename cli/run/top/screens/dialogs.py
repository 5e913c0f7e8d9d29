"""The dialogs of all screens: the question before each change of a run, and the help about keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from ....common.output import Escaped
from ....views.formatting import grid
from ..changes import Change


class ConfirmationScreen(ModalScreen[str | None]):
    """Asks the user to confirm a change and to give its reason.

    The result is the reason, which may be empty, or None if the user does not confirm the change.

    Args:
        change: The change.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel"),
        Binding("left,right,up,down", "app.focus_next", "Other button", show=False),
    ]

    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    def compose(self) -> ComposeResult:
        """Create the text, the field of the reason if the change takes a reason, and the buttons."""
        change = self._change
        with VerticalScroll(classes="dialog"):
            yield Static(Escaped(Text(f"{change.title}?", "bold")), classes="heading")
            effects = [Text(f"• {effect}", overflow="fold") for effect in change.effects]
            same = Text.assemble(("The same as: ", "bright_black"), change.command, overflow="fold")
            yield Static(Escaped(Group(*effects, "", same)))
            if change.takes_reason:
                yield Input(placeholder="the reason that others will see (may be empty)", id="reason")
            with Horizontal(classes="buttons"):
                yield Button(change.title, variant="error", id="confirm")
                yield Button("Cancel", variant="primary", id="cancel")

    def on_mount(self) -> None:
        """Focus the button that changes nothing, so that it receives the keys."""
        self.query_one("#cancel", Button).focus()

    def action_cancel(self) -> None:
        """Leave without a change."""
        self.dismiss(None)

    @on(Button.Pressed, "#cancel")
    def _cancelled(self) -> None:
        self.dismiss(None)

    @on(Input.Submitted)
    def _reason_written(self) -> None:
        self.query_one("#confirm", Button).focus()

    @on(Button.Pressed, "#confirm")
    def _confirmed(self) -> None:
        fields = self.query(Input)
        self.dismiss(fields.first().value.strip() if fields else "")


_OF_TABLES = (
    ("↑ ↓ PgUp PgDn", "Move the cursor, or scroll"),
    ("Enter", "Open the row that has the cursor"),
    ("mouse", "Click a row to choose it, again to open it; click a heading to sort, again to reverse the order"),
)
"""Keys that Textual's table itself handles."""
_NOTES = (
    "rrl top reads only the run directories, and never asks Slurm. rrl status RUN asks Slurm, and may know more.",
    "Restart, drain and inject need your confirmation. Then the manager of the run carries them out.",
)


class HelpScreen(ModalScreen[None]):
    """A table of keys.

    Args:
        bindings: The keys that work on the screen below.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "app.pop_screen", "Back", key_display="Esc")
    ]

    def __init__(self, bindings: Iterable[ActiveBinding]) -> None:
        super().__init__()
        named = (one for one in bindings if one.enabled and not one.binding.system)
        self._keys = [one for one in named if one.tooltip]  # the keys of Textual's own widgets have no tooltip

    def compose(self) -> ComposeResult:
        """Create the page."""
        table = grid("bold", expand=True)
        for one in self._keys:
            table.add_row(self.app.get_key_display(one.binding), one.tooltip)
        for key, text in _OF_TABLES:
            table.add_row(key, text)
        with VerticalScroll(classes="dialog"):
            yield Static(Text("Keys", "bold"), classes="heading")
            yield Static(Group(table, "", *(Text(note, "bright_black", overflow="fold") for note in _NOTES)))
