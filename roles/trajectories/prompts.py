"""Make the prompts of a run's items, and survive the items that the task cannot make a prompt of."""

from __future__ import annotations

from collections.abc import Callable

from .types import Prompt

NO_PROMPT = "no prompt could be made of the item"
"""The reason of each group that was dropped before it was begun."""
MAX_ITEMS_WITHOUT_PROMPT = 32
"""Items in a row without a prompt, after which the items are not at fault: the task is, or the service that it asks."""


class ItemPrompts:
    """The prompts of a run's items, by the item's index.

    Args:
        make: Makes the prompt of one item. It is a user's code: whatever it raises concerns this item only.
    """

    def __init__(self, make: Callable[[int], Prompt]) -> None:
        self._make = make
        self._failures_in_a_row = 0
        self._reported = False
        """A failure has been reported in this life; further ones are only counted in the audit."""
        self._warning: str | None = None

    def prompt(self, item: int) -> Prompt | None:
        """Make the prompt of an item.

        Returns:
            The prompt; None where the task cannot make one.

        Raises:
            ValueError: ``ALL_UNASKABLE`` items in a row have no prompt.
        """
        try:
            prompt = self._make(item)
        except Exception as error:  # whatever a user's task raises: one item of it must not end the run
            self._count_failure(item, error)
            return None
        self._failures_in_a_row = 0
        return prompt

    def warning(self) -> str | None:
        """Return the report of the first item without a prompt, once; None where there is nothing new to report."""
        warning, self._warning = self._warning, None
        return warning

    def _count_failure(self, item: int, error: Exception) -> None:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        self._failures_in_a_row += 1
        if self._failures_in_a_row == MAX_ITEMS_WITHOUT_PROMPT:
            raise ValueError(f"{MAX_ITEMS_WITHOUT_PROMPT} items of [task] in a row, up to item {item}, have no prompt; the last"
                             f" one: {reason}") from error  # fmt: skip
        if not self._reported:
            self._reported = True
            self._warning = (f"warning: item {item} of [task] is dropped: {reason}; others without a prompt are dropped"
                             " too, and counted in the audit")  # fmt: skip
