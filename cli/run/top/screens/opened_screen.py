"""What the screens of an opened run, of its replicas and of its nodes share."""

from __future__ import annotations

from textual import on
from textual.events import ScreenResume
from textual.screen import Screen

from .....core.run_dir import RunDir
from .....core.types import NodeName
from .....manager.model.state import State
from ..changes import ChangeKeys, ChangeRequested, drain_of
from ..run_feed import OpenedRun, RunFeed, Snapshot


class OpenedScreen(Screen[None]):
    """A screen of a run or of a part of it, which shows each reading of the run.

    Args:
        feed: The runs.
        run: The run.
    """

    def __init__(self, feed: RunFeed, run: RunDir) -> None:
        super().__init__()
        self._feed, self._run_dir = feed, run
        self._opened: OpenedRun | None = None
        """The newest reading of the run; None before the first reading."""
        self._keys = ChangeKeys(self)

    @on(ScreenResume)
    def _resumed(self) -> None:
        if self._feed.snapshot is not None:
            self._show(self._feed.snapshot)

    def action_drain(self) -> None:
        """Ask whether to drain the node that is shown or has the cursor, or that of such a replica."""
        if self._opened is not None and self._state is not None and self._node is not None:
            self.post_message(ChangeRequested(drain_of(self._opened.watched, self._state, self._node)))

    @property
    def _state(self) -> State | None:
        return None if self._opened is None else self._opened.watched.state

    @property
    def _node(self) -> NodeName | None:
        raise NotImplementedError

    def _show(self, snapshot: Snapshot) -> None:
        raise NotImplementedError
