"""The end of the logs of a replica, with new lines as they are written."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.text import Text
from textual import work
from textual.widgets import RichLog
from textual.worker import get_current_worker

from .....api.logs.files import Log
from .....api.logs.log_reader import LogReader, line_filter
from .....api.logs.merge import Line
from .....core.run_dir import RunDir
from .....core.text import escaped
from .....core.types import OperationFailed, UsageError
from ....logs.printer import Printer

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
