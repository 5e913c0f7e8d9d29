"""A table that the user can sort and filter; the cursor stays on its row while the rows change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import DataTable, Input

from .....core.text import escaped

MIN_COLUMNS = 5
"""Columns that a shortened text keeps."""
SortKey = tuple[int, float, str]
"""A value of a column for sorting: a rank (rows without a value last), a number, a text."""


def by_number(value: float | None) -> SortKey:
    """Return the sort key of a number; None sorts behind all numbers."""
    return (1, 0.0, "") if value is None else (0, value, "")


def by_text(value: str) -> SortKey:
    """Return the sort key of a text, by its letters without regard to case."""
    return (0, 0.0, value.casefold())


class TableRow(NamedTuple):
    """A row: its key, and a cell and a sort key for each column."""

    key: str
    cells: tuple[Text, ...]
    sort_keys: tuple[SortKey, ...]


class ListTable(Vertical):
    """Rows in the order in which they are given, until the user sorts them by a column.

    Args:
        columns: The headings.
        id: The widget's id.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort", tooltip="Sort by the next column; a click on a heading sorts by it"),
        Binding("S", "reverse", "Reverse", show=False, tooltip="Reverse the order of the rows"),
        Binding("slash", "filter", "Filter", key_display="/", tooltip="Show only rows that contain a text"),
        Binding("escape", "clear_filter", "All rows", show=False, tooltip="Show all rows again"),
    ]

    class Opened(Message):
        """The user has pressed Enter on a row, or clicked the row that has the cursor."""

        def __init__(self, table: ListTable, key: str) -> None:
            super().__init__()
            self.table, self.key = table, key

        @property
        def control(self) -> ListTable:
            """The table."""
            return self.table

    def __init__(self, columns: Sequence[str], id: str) -> None:
        super().__init__(id=id)
        self._columns = columns
        self._rows: list[TableRow] = []
        self._shown: dict[str, TableRow] = {}
        self._sorted_by: int | None = None
        self._reversed = False

    def compose(self) -> ComposeResult:
        """Create the table, and the field of the filter, which is hidden at first."""
        yield DataTable[Text](cursor_type="row", zebra_stripes=False)
        yield Input(placeholder="show only rows that contain this", classes="hidden")

    def on_mount(self) -> None:
        """Add the columns."""
        self._add_columns()

    def focus_table(self) -> None:
        """Focus the table, so that it receives the keys."""
        self._table.focus()

    @property
    def cursor_key(self) -> str | None:
        """The key of the row that has the cursor; None if there is no row."""
        keys = list(self._shown)
        row = self._table.cursor_row
        return keys[row] if 0 <= row < len(keys) else None

    def show(self, rows: Sequence[TableRow]) -> None:
        """Show these rows. The cursor stays on its row while ``rows`` contains a row with the same key."""
        self._rows = [row._replace(cells=tuple(map(_safe, row.cells))) for row in rows]
        self._draw()

    # ── actions ────────────────────────────────────────────────────────────────────────────────────────────────────
    def action_sort(self) -> None:
        """Sort by the next column; after the last column, restore the given order."""
        following = 0 if self._sorted_by is None else self._sorted_by + 1
        self._sort(following if following < len(self._columns) else None, reverse=False)

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._sort(self._sorted_by, reverse=not self._reversed)

    def action_filter(self) -> None:
        """Let the user enter a text; only rows that contain it are shown."""
        self._filter.remove_class("hidden")
        self._filter.focus()

    def action_clear_filter(self) -> None:
        """Show all rows again."""
        self._filter.value = ""
        self._filter.add_class("hidden")
        self._table.focus()
        self._draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible: a filter can be cleared only if a filter is set."""
        return action != "clear_filter" or not self._filter.has_class("hidden")

    # ── events ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @on(Input.Changed)
    def _filter_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._draw()

    @on(Input.Submitted)
    def _filter_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._table.focus()
        if not self._filter.value:
            self._filter.add_class("hidden")

    @on(DataTable.HeaderSelected)
    def _heading_clicked(self, event: DataTable.HeaderSelected) -> None:
        event.stop()
        again = event.column_index == self._sorted_by
        self._sort(event.column_index, reverse=again and not self._reversed)

    @on(DataTable.RowSelected)
    def _row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        if event.row_key.value is not None:
            self.post_message(self.Opened(self, event.row_key.value))

    # ── drawing ────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    @property
    def _filter(self) -> Input:
        return self.query_one(Input)

    def _sort(self, column: int | None, *, reverse: bool) -> None:
        self._sorted_by, self._reversed = column, reverse
        key = self.cursor_key
        self._table.clear(columns=True)
        self._add_columns()
        self._shown = {}
        self._draw(key)

    def _add_columns(self) -> None:
        for index, name in enumerate(self._columns):
            mark = (" ▼" if self._reversed else " ▲") if index == self._sorted_by else ""
            label = Text(f"{name}{mark}", no_wrap=True, overflow="ellipsis")
            self._table.add_column(label, key=str(index), width=label.cell_len)

    def on_resize(self) -> None:
        """Fit the columns into the new width."""
        self._sort(self._sorted_by, reverse=self._reversed)

    def _fit_columns(self) -> None:
        """Make each column as wide as its heading and its cells.

        If they do not fit the terminal, headings that are wider than their cells are shortened, then the widest column.
        A table of Textual 8 measures new rows itself, but only once it is idle. Lines that it has drawn earlier keep
        the old widths.
        """
        columns, shown = self._table.ordered_columns, self._shown.values()
        cells = [max((row.cells[index].cell_len for row in shown), default=0) for index in range(len(columns))]
        widths = [max(column.label.cell_len, width) for column, width in zip(columns, cells, strict=True)]
        free = self._table.scrollable_content_region.width - sum(widths) - 2 * self._table.cell_padding * len(widths)
        widest = max(range(len(widths)), key=cells.__getitem__)
        for index in sorted(range(len(widths)), key=lambda one: cells[one] - widths[one]):
            least = MIN_COLUMNS if index == widest else max(cells[index], MIN_COLUMNS)
            given = max(0, min(-free, widths[index] - least))
            widths[index], free = widths[index] - given, free + given
        for column, width in zip(columns, widths, strict=True):
            column.width = width

    def _selected_rows(self) -> list[TableRow]:
        """Return the rows that contain the text of the filter, in the order that the user has chosen."""
        wanted = self._filter.value.casefold()
        rows = [row for row in self._rows if any(wanted in cell.plain.casefold() for cell in row.cells)]
        column = self._sorted_by
        if column is not None:
            return sorted(rows, key=lambda row: row.sort_keys[column], reverse=self._reversed)
        return rows[::-1] if self._reversed else rows

    def _draw(self, cursor_key: str | None = None) -> None:
        """Update the table; ``cursor_key`` names the row that the cursor moves to; None keeps the cursor on its row."""
        rows, table = self._selected_rows(), self._table
        if [row.key for row in rows] == list(self._shown):
            for row in rows:
                self._update(row)
            self._fit_columns()
            return
        key, scrolled = cursor_key or self.cursor_key, table.scroll_offset
        table.clear()
        self._shown = {row.key: row for row in rows}
        self._fit_columns()
        for row in rows:
            table.add_row(*row.cells, key=row.key)
        if key in self._shown:
            table.move_cursor(row=list(self._shown).index(key), animate=False, scroll=False)
            table.scroll_to(*scrolled, animate=False)

    def _update(self, row: TableRow) -> None:
        """Change the cells of a row that differ from those that are shown."""
        before = self._shown[row.key]
        self._shown[row.key] = row
        for index, (old, new) in enumerate(zip(before.cells, row.cells, strict=True)):
            if old != new or old.style != new.style:
                wider = len(new) != len(old)
                self._table.update_cell(row.key, str(index), new, update_width=wider)


def _safe(cell: Text) -> Text:
    """Return a cell whose text cannot control the terminal, and ends with … if it does not fit its column."""
    return Text(escaped(cell.plain), cell.style, no_wrap=True, overflow="ellipsis")
