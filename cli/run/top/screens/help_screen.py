"""The keys of the screen from which help was called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

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
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold", ratio=1)
        for one in self._keys:
            table.add_row(self.app.get_key_display(one.binding), one.tooltip)
        for key, text in _OF_TABLES:
            table.add_row(key, text)
        with VerticalScroll(classes="dialog"):
            yield Static(Text("Keys", "bold"), classes="heading")
            yield Static(Group(table, "", *(Text(note, "bright_black", overflow="fold") for note in _NOTES)))
