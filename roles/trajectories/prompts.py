"""Makes the prompts of a run's items, and skips the items whose prompt the task cannot make."""

from __future__ import annotations

from collections.abc import Callable

from .types import Prompt

NO_PROMPT = "no prompt could be made of the item"
"""Reason for dropping a group that has no prompt."""
MAX_ITEMS_WITHOUT_PROMPT = 32
"""Number of consecutive items without a prompt after which the task, or the service that it calls, is at fault rather
than the items."""


class ItemPrompts:
    """Makes the prompt of each item of a run.

    Args:
        make: Makes the prompt of one item. It is user code: any exception it raises concerns only that item.
    """

    def __init__(self, make: Callable[[int], Prompt]) -> None:
        self._make = make
        self._failures_in_a_row = 0
        self._reported = False
        """True once this process has reported a failure; further failures are only counted in the audit."""
        self._warning: str | None = None

    def prompt(self, item: int) -> Prompt | None:
        """Make the prompt of an item.

        Returns:
            The prompt, or None if the task cannot make it.

        Raises:
            ValueError: ``MAX_ITEMS_WITHOUT_PROMPT`` consecutive items have no prompt.
        """
        try:
            prompt = self._make(item)
        except Exception as error:  # user code may raise anything: one item must not end the run
            self._count_failure(item, error)
            return None
        self._failures_in_a_row = 0
        return prompt

    def warning(self) -> str | None:
        """Return the report of the first item without a prompt, once; otherwise None."""
        warning, self._warning = self._warning, None
        return warning

    def _count_failure(self, item: int, error: Exception) -> None:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        self._failures_in_a_row += 1
        if self._failures_in_a_row == MAX_ITEMS_WITHOUT_PROMPT:
            raise ValueError(f"{MAX_ITEMS_WITHOUT_PROMPT} consecutive items of [task], up to item {item}, have no"
                             f" prompt; the last error: {reason}") from error  # fmt: skip
        if not self._reported:
            self._reported = True
            self._warning = (f"warning: item {item} of [task] is dropped: {reason}; further items without a prompt"
                             " are dropped silently and counted in the audit")  # fmt: skip
