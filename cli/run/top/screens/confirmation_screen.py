"""The question before each change of a run, with the effects of the change and the command that makes it."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from ....common.output import Escaped
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
