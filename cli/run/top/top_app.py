"""The application behind ``rrl top``: its screens, and the requests that the user has confirmed."""

from __future__ import annotations

from typing import ClassVar

from rich.terminal_theme import TerminalTheme
from textual import on, work
from textual.app import App
from textual.binding import Binding, BindingType

from ....api.watching.runs_watcher import RunsWatcher
from ....core.run_dir import RunDir
from ....core.text import escaped
from ....core.types import OperationFailed, UsageError
from .changes import Change, ChangeRequested
from .run_feed import RunFeed, Snapshot
from .screens.dialogs import ConfirmationScreen, HelpScreen
from .screens.run_screen import RunScreen
from .screens.runs_screen import RunsScreen

LIGHT, DARK = "textual-light", "textual-dark"
DARK_COLOURS = TerminalTheme(
    (30, 32, 38),
    (216, 218, 224),
    [
        (30, 32, 38),
        (240, 98, 98),
        (126, 200, 126),
        (229, 192, 96),
        (104, 160, 240),
        (198, 130, 226),
        (86, 194, 206),
        (216, 218, 224),
    ],
    [
        (128, 134, 146),
        (240, 98, 98),
        (126, 200, 126),
        (229, 192, 96),
        (104, 160, 240),
        (198, 130, 226),
        (86, 194, 206),
        (255, 255, 255),
    ],
)
"""The colours of the views on a dark background, on which the grey of Textual's own colours would hardly be visible."""


class TopApp(App[None]):
    """Shows the runs, and lets the user change them.

    Args:
        watcher: Reads the runs.
        opened: The run that is shown first; None shows the table of all runs first.
    """

    TITLE = "rrl top"
    CSS_PATH = "top.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "switch_theme", "Light/dark", show=False, tooltip="Switch between light and dark"),
        Binding("question_mark", "help", "Help", key_display="?", tooltip="Show the keys of a screen"),
        Binding("q", "quit", "Quit", tooltip="Leave rrl top; the runs go on"),
    ]

    def __init__(self, watcher: RunsWatcher, opened: RunDir | None = None) -> None:
        super().__init__()
        self.ansi_theme_dark = DARK_COLOURS
        self._feed = RunFeed(self, watcher)
        self._first = opened

    def on_mount(self) -> None:
        """Show the first screen, and begin to read."""
        self.push_screen(RunsScreen(self._feed))
        if self._first is not None:
            self.push_screen(RunScreen(self._feed, self._first))
        self._read()

    def on_unmount(self) -> None:
        """End the thread that reads."""
        self._feed.stop()

    @work(thread=True)
    def _read(self) -> None:
        self._feed.read_until_stopped(self._hand_over)

    def _hand_over(self, snapshot: Snapshot) -> None:
        if self.is_running:
            self.call_from_thread(self._feed.publish, snapshot)

    # ── screens ────────────────────────────────────────────────────────────────────────────────────────────────────
    @on(RunsScreen.Opened)
    def _run_opened(self, event: RunsScreen.Opened) -> None:
        self.push_screen(RunScreen(self._feed, event.watched.run))

    def action_help(self) -> None:
        """Show the keys of the present screen."""
        self.push_screen(HelpScreen(self.screen.active_bindings.values()))

    def action_switch_theme(self) -> None:
        """Switch between light and dark."""
        self.theme = LIGHT if self.current_theme.dark else DARK

    # ── changes ────────────────────────────────────────────────────────────────────────────────────────────────────
    @on(ChangeRequested)
    def _change_requested(self, event: ChangeRequested) -> None:
        change = event.change

        def answered(reason: str | None) -> None:
            if reason is not None:
                self._request(change, reason)

        self.push_screen(ConfirmationScreen(change), answered)

    @work(thread=True)
    def _request(self, change: Change, reason: str) -> None:
        try:
            text, failed = change.request(reason), False
        except (UsageError, OperationFailed) as error:
            text, failed = str(error), True
        self.call_from_thread(
            self.notify, escaped(text), severity="error" if failed else "information", timeout=10, markup=False
        )
