"""Draw a view in place on a terminal, again and again, and send only the cells that have changed.

A view that is drawn twice a second would otherwise send all of its lines each time, which is too much for a slow
connection. The lines stand where the cursor was at the first drawing. Every later drawing compares the new lines with
those on the screen, moves the cursor to each group of cells that differ, and writes only these cells.

After a change of the terminal's size, it is unknown where the terminal has moved the lines. The screen is then cleared,
and everything is drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.cells import get_character_cell_size
from rich.console import COLOR_SYSTEMS, Console, RenderableType
from rich.segment import Segment
from rich.style import Style

from ..common.output import Escaped

MAX_EQUAL_CELLS = 6
"""Maximum number of equal cells between two changes that are written again, because moving the cursor over them takes
as many bytes."""
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[0m\x1b[?25h"
_CLEAR_SCREEN = "\x1b[H\x1b[J"
_ERASE_LINE, _ERASE_BELOW = "\x1b[K", "\x1b[J"

Cell = tuple[str, Style | None]
"""A character with its combining characters, and its style. A wide character is followed by a cell without text."""
Line = Sequence[Cell]


class LiveDisplay:
    """The lines of a view on the terminal of ``console``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[Line] = []
        """The lines on the screen."""
        self._row = 0
        """Row of the cursor, from the first line."""
        self._size: tuple[int, int] | None = None
        """(columns, rows) of the terminal at the last drawing; None before the first drawing."""
        self._cleared = False
        """True if the screen must be cleared before the next drawing."""

    def lines(self, view: RenderableType) -> list[Line]:
        """Return the lines of a view, cut off at the present width of the terminal."""
        options = self._console.options.update(width=self._console.width, height=None)
        rendered = self._console.render_lines(Escaped(view), options, pad=False)
        return [_cells(line, self._console.no_color) for line in rendered]

    @property
    def width(self) -> int:
        """Return the number of columns of the terminal."""
        return self._console.width

    @property
    def height(self) -> int:
        """Return the number of lines that the terminal can show."""
        return self._console.height

    def draw(self, lines: Sequence[Line]) -> None:
        """Replace the lines on the screen by these lines; lines beyond the terminal's height are left out."""
        size = self._console.width, self._console.height
        output = _HIDE_CURSOR if self._size is None else ""
        if self._cleared or self._size not in (None, size):
            output += _CLEAR_SCREEN
            self._lines, self._row = [], 0
        shown = [*lines[: size[1]]]
        output += "".join(self._changes(shown))
        self._lines, self._size, self._cleared = shown, size, False
        if output:
            self._write(output)

    def clear(self) -> None:
        """Clear the screen at the next drawing, and draw everything again."""
        self._cleared = True

    def finish(self, view: RenderableType | None = None, *, erase: bool = False) -> None:
        """Leave the cursor below the lines, or remove the lines (``erase``), or replace them by the whole ``view``."""
        if self._size is not None and (erase or view is not None):
            self._write(self._move(0) + _ERASE_BELOW + _SHOW_CURSOR)
        elif self._size is not None:
            self._write(self._move(max(0, len(self._lines) - 1)) + "\n" + _SHOW_CURSOR)
        self._size = None
        if view is not None:
            self._console.print(Escaped(view))

    def _changes(self, lines: Sequence[Line]) -> Iterator[str]:
        """Yield the text and control codes that turn the lines on the screen into ``lines``."""
        before = len(self._lines)
        for row, line in enumerate(lines):
            old: Line = self._lines[row] if row < before else ()
            if row >= max(1, before):
                yield self._move(row - 1) + "\n"  # a new line, which scrolls a full screen
                self._row = row
            runs = list(_runs(old, line))
            if runs or len(old) > len(line):
                yield self._move(row)
            for start, end in runs:
                yield f"\x1b[{start + 1}G" if start else "\r"
                yield self._styled(line[start:end])
            if len(old) > len(line):
                yield f"\x1b[{len(line) + 1}G{_ERASE_LINE}"
        if before > len(lines):
            yield self._move(len(lines)) + _ERASE_BELOW

    def _move(self, row: int) -> str:
        """Return the control codes that move the cursor to the start of a row that is already on the screen."""
        rows, self._row = row - self._row, row
        return "\r" if not rows else f"\r\x1b[{abs(rows)}{'B' if rows > 0 else 'A'}"

    def _styled(self, cells: Iterable[Cell]) -> str:
        name = self._console.color_system
        system = COLOR_SYSTEMS[name] if name is not None else None
        parts: list[str] = []
        for style, group in groupby(cells, key=lambda cell: cell[1]):
            text = "".join(cell[0] for cell in group)
            parts.append(text if style is None else style.render(text, color_system=system))
        return "".join(parts)

    def _write(self, output: str) -> None:
        self._console.file.write(output)
        self._console.file.flush()


def _cells(segments: Sequence[Segment], no_color: bool) -> Line:
    """Return the cells of a line, without blanks at its end."""
    cells: list[Cell] = []
    for text, style, control in Segment.remove_color(segments) if no_color else segments:
        if control:
            continue
        style = style or None  # a style without effect counts as no style
        for character in text:
            width = get_character_cell_size(character)
            if width:
                cells += [(character, style), *[("", style)] * (width - 1)]
            elif cells:
                last = len(cells) - 1
                while last and not cells[last][0]:
                    last -= 1
                cells[last] = cells[last][0] + character, cells[last][1]
    while cells and cells[-1][0] == " " and not _is_visible(cells[-1][1]):
        cells.pop()
    return cells


def _is_visible(style: Style | None) -> bool:
    """Return whether a blank with this style differs from an erased cell."""
    return style is not None and bool(style.bgcolor or style.underline or style.reverse or style.strike)


def _runs(old: Line, new: Line) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each group of adjacent cells in ``new`` to write; groups with a small gap are joined."""
    start = end = -1
    for index, cell in enumerate(new):
        if index < len(old) and old[index] == cell:
            continue
        if start >= 0 and index - end > MAX_EQUAL_CELLS:
            yield start, end
            start = -1
        start, end = index if start < 0 else start, index + 1
    if start >= 0:
        yield start, end
