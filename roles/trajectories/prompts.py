"""Makes the prompts of a run's items and their groups, and skips items whose prompt the task cannot make."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count

from ...config.model_folder import max_length
from ...core.run_spec import RunSpec
from ..models.tokenizer import Tokenizer
from .durable.groups import Group
from .durable.log import DurableState
from .durable.records import GroupCreated, GroupDropped, ItemsOrdered, pack_tokens
from .types import Prompt

NO_PROMPT = "no prompt could be made of the item"
"""Reason for dropping a group that has no prompt."""
MAX_ITEMS_WITHOUT_PROMPT = 32
"""Number of consecutive items without a prompt after which the task or a service that it calls is considered faulty,
rather than the items."""


def first_item_with_prompt(make: Callable[[int], Prompt]) -> int:
    """Return the first item whose prompt the task can make.

    Raises:
        ValueError: None of the first :data:`MAX_ITEMS_WITHOUT_PROMPT` items has a prompt.
    """
    prompts = ItemPrompts(make)
    return next(item for item in count() if prompts.prompt(item) is not None)


class ItemPrompts:
    """Makes the prompt of each item of a run.

    Args:
        make: Makes the prompt of one item. It is user code, so any exception that it raises concerns only this item.
    """

    def __init__(self, make: Callable[[int], Prompt]) -> None:
        self._make = make
        self._made: dict[int, Prompt | None] = {}
        """Prompts that :meth:`order` has made and :meth:`prompt` has not returned yet; None for an item without one."""
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
        if item in self._made:
            return self._made.pop(item)
        try:
            prompt = self._make(item)
        except BaseException as error:  # user code may raise anything: one item must not end the run
            self._count_failure(item, error)
            return None
        self._failures_in_a_row = 0
        return prompt

    def order(self, items: Iterable[int], expected: Callable[[Prompt], float]) -> tuple[int, ...]:
        """Return items in the order of the values that ``expected`` returns for their prompts, the largest first.

        The prompts are made and kept until :meth:`prompt` returns them. Items without a prompt come last.
        """
        made = {item: self.prompt(item) for item in items}
        values = {item: expected(prompt) if prompt else -math.inf for item, prompt in made.items()}
        self._made = made
        return tuple(sorted(made, key=lambda item: (-values[item], item)))

    def warning(self) -> str | None:
        """Return the report of the first item without a prompt, once; otherwise None."""
        warning, self._warning = self._warning, None
        return warning

    def _count_failure(self, item: int, error: BaseException) -> None:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        self._failures_in_a_row += 1
        if self._failures_in_a_row == MAX_ITEMS_WITHOUT_PROMPT:
            raise ValueError(
                f"{MAX_ITEMS_WITHOUT_PROMPT} consecutive items of [task], up to item {item}, have no"
                f" prompt; the last error: {reason}"
            ) from error
        if not self._reported:
            self._reported = True
            self._warning = (
                f"warning: item {item} of [task] is dropped: {reason}; further items without a prompt"
                " are dropped without a message, and counted in the audit"
            )


class GroupMaker:
    """Creates the groups of a run, one for each item.

    Args:
        durable: State and log of the store.
        prompts: Makes the prompts of the items.
        group_size: Number of trajectories per prompt.
        window: Number of items that are ordered by expected length, the longest first. With 1, items keep their order.
    """

    def __init__(self, durable: DurableState, prompts: ItemPrompts, group_size: int, window: int) -> None:
        self._durable = durable
        self._state = durable.state
        self._prompts = prompts
        self._group_size = group_size
        self._window = window

    def create(self) -> Group:
        """Create the group of the next item that has a prompt, and drop all items before it, which have no prompt."""
        while (prompt := self._next_prompt()) is None:
            pass
        number, first = self._state.next_group, self._state.next_trajectory
        estimate = self._state.lengths.expect(prompt.tokens) if self._state.lengths.separates else None
        expected = estimate.mean if estimate else None
        tokens = pack_tokens(prompt.tokens)
        self._durable.write(GroupCreated(number, first, self._group_size, prompt.item, tokens, expected, prompt.source))
        return self._state.groups[number]

    def _next_prompt(self) -> Prompt | None:
        """Return the prompt of the next item, or drop the item and return None if the task cannot make its prompt.

        Raises:
            ValueError: ``MAX_ITEMS_WITHOUT_PROMPT`` consecutive items have no prompt.
        """
        number = self._state.next_group
        if not self._state.item_order and self._window > 1 and self._state.lengths.separates:
            items, expect = range(number, number + self._window), self._state.lengths.expect
            self._durable.write(ItemsOrdered(self._prompts.order(items, lambda each: expect(each.tokens).mean)))
        item = self._state.item_order[0] if self._state.item_order else number
        prompt = self._prompts.prompt(item)
        if prompt is None:
            self._durable.write(GroupCreated(number, self._state.next_trajectory, self._group_size, item, b""))
            self._durable.write(GroupDropped(number, self._group_size, NO_PROMPT))
        return prompt


# ── faults of the scorer ───────────────────────────────────────────────────────────────────────────────────────────
FAULTS_WINDOW = 32
"""Number of newest groups among which the faults of the scorer are counted. If the scorer fails for more than half of
these groups, the code of the scorer is considered faulty, rather than a few answers. If a scorer fails for a tenth of
all groups, the probability of seventeen faults among thirty-two groups is below 1e-8."""


class ScorerFaults:
    """Counts the newest groups that faults in the scorer's own code have dropped.

    The count is volatile: it begins again after a restart of the store, and so after `rrl resume` with a corrected
    scorer.
    """

    def __init__(self) -> None:
        self._newest: deque[bool] = deque(maxlen=FAULTS_WINDOW)
        """For each of the newest groups, whether a fault of the scorer has dropped it."""

    def group_scored(self) -> None:
        """Count a group whose answers all have a score."""
        self._newest.append(False)

    def group_dropped(self, *, faulty: bool) -> None:
        """Count a group that was dropped because an answer could not be scored, perhaps by a fault of the scorer."""
        self._newest.append(faulty)

    @property
    def prevailing(self) -> int:
        """Number of groups that faults have dropped, if these are more than half of the window; otherwise 0."""
        faults = sum(self._newest)
        return faults if 2 * faults > FAULTS_WINDOW else 0


class UnfitPrompt(ValueError):
    """A prompt is empty, or too long for an answer to follow."""


def prompt_encoder(job: RunSpec, tokenizer: Tokenizer) -> Callable[[int, str], Prompt]:
    """Return the function that makes the prompt of an item from the text that the task returned for it.

    The function raises UnfitPrompt, and ValueError for a text that the tokenizer cannot encode.
    """
    max_new_tokens = job.sampling.max_new_tokens
    longest = _longest(job)

    def encode(item: int, text: str) -> Prompt:
        tokens = tokenizer.prompt(text)
        if not tokens:
            raise UnfitPrompt(f"the prompt of item {item} of [task] has no tokens")
        if len(tokens) + max_new_tokens > longest:
            raise UnfitPrompt(
                f"the prompt of item {item} of [task] has {len(tokens)} tokens; with max_new_tokens"
                f" = {max_new_tokens} this exceeds max_length = {longest:g} of the model"
            )
        return Prompt(item, tokens)

    return encode


def _longest(job: RunSpec) -> float:
    """Return how many tokens prompt and answer may have together.

    Returns inf if [model] defines only the tokenizer, because the model is the user's own.
    """
    model = job.model
    built_in = any(role.built_in for role in job.roles if role.traits.has_weights)
    return max_length(model.path, model.max_length) if built_in or model.path is not None else math.inf
