"""After many small changes the screen is the same as after a single drawing, and each change sends few bytes."""

from __future__ import annotations

import io
from collections.abc import Callable

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, ConsoleDimensions, Group
from rich.text import Text

from rrl.cli.run.live_display import LiveDisplay
from rrl.cli.views.status import status_view
from rrl.manager.model.events import PhaseEntered
from rrl.tests.support.cli.story import Story
from rrl.tests.support.examples import examples

COLUMNS, ROWS = 24, 8


class Screen:
    """A display on an emulated terminal."""

    def __init__(self, columns: int = COLUMNS, rows: int = ROWS, *, no_color: bool = False) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=True, color_system="standard", width=columns, height=rows, markup=False,
            highlight=False, emoji=False, no_color=no_color, legacy_windows=False, _environ={},
        )  # fmt: skip
        self.display = LiveDisplay(self.console)
        self._screen = pyte.Screen(columns, rows)
        self._screen.set_mode(pyte.modes.LNM)  # adds a carriage return to a line feed, as a terminal does
        self._stream = pyte.Stream(self._screen)

    def draw(self, *lines: Text) -> str:
        """Draw the lines, and return the bytes that were sent."""
        return self.sent(lambda: self.display.draw(self.display.lines(Group(*lines))))

    def sent(self, drawing: Callable[[], None]) -> str:
        """Return what ``drawing`` sends to the terminal."""
        before = self.file.tell()
        drawing()
        sent = self.file.getvalue()[before:]
        self._stream.feed(sent)
        return sent

    def resize(self, columns: int, rows: int) -> None:
        self._screen.resize(rows, columns)
        self.console.size = ConsoleDimensions(columns, rows)

    @property
    def cells(self) -> list[list[tuple[str, str, bool]]]:
        """Return (text, colour, bold) of each cell, by row."""
        buffer, size = self._screen.buffer, (self._screen.lines, self._screen.columns)
        return [[(buffer[row][column].data, buffer[row][column].fg, buffer[row][column].bold)
                 for column in range(size[1])] for row in range(size[0])]  # fmt: skip

    @property
    def text(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]


_styles = st.sampled_from(["", "red", "bold", "bold green", "underline", "bright_black"])
_pieces = st.tuples(st.text(st.sampled_from("ab1 …█世界é"), max_size=7), _styles)
_lines = st.lists(_pieces, max_size=4).map(lambda pieces: Text.assemble(*pieces, no_wrap=True, overflow="crop"))
_frames = st.lists(st.lists(_lines, max_size=ROWS + 2), min_size=1, max_size=6)


@examples(25, 2000)
@given(_frames)
def test_screen_after_changes_is_that_of_one_drawing(frames: list[list[Text]]) -> None:
    changed = Screen()
    for frame in frames:
        changed.draw(*frame)
        once = Screen()
        once.draw(*frame)
        assert changed.cells == once.cells
    assert once.text == (_expected(frames[-1]) + [""] * ROWS)[:ROWS]


def _expected(frame: list[Text]) -> list[str]:
    """Return the text of the lines as rich prints it, cut off at the edge of the terminal."""
    console = Console(file=io.StringIO(), width=COLUMNS, _environ={})
    with console.capture() as captured:
        for line in frame:
            console.print(line, no_wrap=True, overflow="crop")
    return [line.rstrip() for line in captured.get().split("\n")[: len(frame)]]


@examples(10, 500)
@given(_frames, st.integers(4, 40), st.integers(1, 12))
def test_screen_after_a_change_of_size_has_no_remains_of_before(
    frames: list[list[Text]], columns: int, rows: int
) -> None:
    changed = Screen()
    changed.draw(*frames[0])
    changed.resize(columns, rows)
    changed.draw(*frames[-1])
    once = Screen(columns, rows)
    once.draw(*frames[-1])
    assert changed.cells == once.cells


def test_unchanged_view_sends_nothing_and_a_changed_digit_few_bytes() -> None:
    screen = Screen(200, 60)
    screen.draw(Text("step 12"), Text("for 41s"), Text("end"))
    assert screen.draw(Text("step 12"), Text("for 41s"), Text("end")) == ""
    assert screen.draw(Text("step 12"), Text("for 42s"), Text("end")) == "\r\x1b[1A\x1b[6G2"


def test_update_of_one_second_is_a_small_part_of_a_whole_view() -> None:
    story, screen = Story().works(), Screen(200, 60)

    def draw(seconds: float) -> int:
        view = status_view(story.recorded(), story.now + seconds, 200)
        return len(screen.sent(lambda: screen.display.draw(screen.display.lines(view))).encode())

    whole, at_rest = draw(1.0), draw(2.0)
    assert at_rest < 150 < whole / 10
    story.record(PhaseEntered(story.incarnation("trainer/0"), "train"))
    story.commits(13)
    assert draw(0.0) < 400


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_are_omitted_where_they_are_unwanted(no_color: bool) -> None:
    screen = Screen(no_color=no_color)
    screen.draw(Text("dead", "bold red"))
    assert screen.cells[0][0] == ("d", "default" if no_color else "red", True)


def test_display_leaves_the_cursor_below_its_lines() -> None:
    screen = Screen()
    screen.draw(Text("one"), Text("two"))
    screen.draw(Text("ONE"), Text("two"))
    screen.sent(screen.display.finish)
    screen.sent(lambda: screen.console.print("next"))
    assert screen.text[:4] == ["ONE", "two", "next", ""]
    assert "\x1b[?25h" in screen.file.getvalue()


def test_final_view_replaces_lines_that_were_left_out() -> None:
    screen = Screen(rows=4)
    screen.draw(*(Text(str(number)) for number in range(9)))
    assert screen.text == ["0", "1", "2", "3"]
    screen.sent(lambda: screen.display.finish(Text("\n").join(Text(f"line {number}") for number in range(6))))
    assert screen.text == ["line 3", "line 4", "line 5", ""]
    erased = Screen()
    erased.draw(Text("one"), Text("two"))
    erased.sent(lambda: erased.display.finish(erase=True))
    assert erased.text == [""] * ROWS


def test_control_characters_of_a_view_do_not_reach_the_terminal() -> None:
    screen = Screen()
    assert "\x1b[31m" not in screen.draw(Text("a\x1b[31mb\x07"))
    assert screen.text[0].startswith("a")


@pytest.mark.parametrize("end", ["", "世"])
def test_escaped_text_that_is_longer_than_its_line_moves_no_other_line(end: str) -> None:
    screen = Screen()
    screen.draw(Text("\x1b" * (COLUMNS - 1 - 2 * len(end)) + end), Text("two"))
    screen.draw(Text("\x1b" * COLUMNS), Text("TWO"))
    assert screen.text[1:] == ["TWO", *[""] * (ROWS - 2)]
    screen.draw(Text(f"{'a' * (COLUMNS - 7)}\x1b{end}"), Text("TWO"))
    assert screen.text[0] == f"{'a' * (COLUMNS - 7)}\\x1b{end}"
