"""What came of the answers of a step, and which groups have a signal to learn from.

The figures of a step count its groups and, with ``[sampling] refill``, those that were dropped without signal since the
previous step was bound. Otherwise the mean reward would drift to the middle, since the groups that the policy always or
never solves are dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from statistics import fmean

from ..durable.groups import Group
from ..durable.records import NO_SIGNAL, DropCause, Outcomes
from ..durable.state import State
from ..durable.trained_samples import sample_rewards, trained_tokens, truncated_samples

TOKENS_AGED = "tokens_aged_"
"""Prefix of the names of figures that count a step's tokens of one age. The prefix is followed by the age in training
steps."""
GUEST_TOKENS = "guest_tokens"
"""Name of the figure that counts a step's tokens that guests sampled; without such tokens there is no figure."""
EPISODES_AT_WORK = "episodes_at_work"
"""Name of the figure that counts the episodes whose newest attempt is being made."""
MAX_COUNTED_AGE = 15
"""Age in training steps from which on all tokens are counted together. Without a limit on staleness, ages can be
large."""
_TAIL = 0.95
"""Quantile of the lengths of answers that is a figure."""


def has_signal(group: Group, *, ignores_truncated: bool) -> bool:
    """Return whether the training rewards of a complete group differ, so that its answers have advantages."""
    compared = compared_rewards(group, ignores_truncated=ignores_truncated)
    return any(len(set(rewards.values())) > 1 for rewards in compared.values())


def compared_rewards(group: Group, *, ignores_truncated: bool) -> dict[str, dict[int, float]]:
    """Return the training rewards that a complete group compares, by agent and trajectory.

    Without rewards by name, the only agent is ``""``. With ``ignores_truncated`` only answers count that no limit cut,
    and episodes with a sample without such an answer.
    """
    compared: dict[str, dict[int, float]] = {}
    for track in group.trajectories:
        for (agent, reward), truncated in zip(sample_rewards(track), truncated_samples(track), strict=True):
            if not (ignores_truncated and truncated):
                compared.setdefault(agent, {})[track.id] = reward
    return compared


def spread(rewards: Collection[float]) -> float:
    """Return the unbiased standard deviation of rewards; 0 for a single one."""
    mean = fmean(rewards)
    return math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1))


class Refill:
    """Drops the groups whose places in a step other groups take (``[sampling] refill``).

    Args:
        state: The store's state.
        most: Number of groups that may be dropped between two steps. With that many, groups are trained as they are, so
            that no step waits without end if all prompts are solved. 0 if no group is to be dropped.
        ignores_truncated: As in :func:`compared_rewards`.
        drop: Drops a group for a reason and a cause.
    """

    def __init__(
        self, state: State, most: float, ignores_truncated: bool, drop: Callable[[Group, str, DropCause], None]
    ) -> None:
        self._state, self._most, self._ignores_truncated, self._drop = state, most, ignores_truncated, drop

    def drop_from(self, groups: Iterable[Group]) -> None:
        """Drop the groups that are complete, not bound and without signal, in order, up to the limit."""
        for group in groups:
            if self._state.refilled.groups >= self._most:
                return
            is_open = group.bound is None and not group.unscored
            if is_open and not has_signal(group, ignores_truncated=self._ignores_truncated):
                self._drop(group, NO_SIGNAL, DropCause.NO_SIGNAL)


def outcomes_of(group: Group) -> Outcomes:
    """Return what came of a complete group."""
    scores = [track.score for track in group.trajectories if track.score is not None]
    rewards: dict[str, tuple[int, float]] = {}
    for score in scores:
        named = {**score.parts, **({f"source_{group.created.source}": score.reward} if group.created.source else {})}
        for name, reward in named.items():
            count, total = rewards.get(name, (0, 0.0))
            rewards[name] = count + 1, total + reward
    return Outcomes(
        1,
        len(scores),
        sum(score.reward for score in scores),
        sum(score.training for score in scores),
        sum(any(truncated_samples(track)) for track in group.trajectories),
        sum(answer.length for answer in group.answers),
        rewards,
    )


def step_figures(state: State, number: int, *, ages_limited: bool, ignores_truncated: bool) -> dict[str, float]:
    """Return the figures of the bound step ``number`` and of the run up to it (docs/glossary.md, docs/stream.md).

    With ``ages_limited``, groups that were dropped for their age are figures even if there are none.
    """
    groups = [state.groups[group] for group in state.groups_of(number)]
    return {
        **_rewards(state, number, groups, ignores_truncated=ignores_truncated),
        **_lengths(groups),
        **_parts(state, number, len(groups), ages_limited=ages_limited),
        **_run(state),
        **state.episode_records.figures(),
    }


def _rewards(state: State, number: int, groups: list[Group], *, ignores_truncated: bool) -> dict[str, float]:
    refilled = state.steps[number][-1].refilled
    total = sum(map(outcomes_of, groups), Outcomes()) + refilled
    without = sum(not has_signal(group, ignores_truncated=ignores_truncated) for group in groups)
    compared = (compared_rewards(group, ignores_truncated=False).values() for group in groups)
    return {
        **{f"reward_{name}": reward / count for name, (count, reward) in sorted(total.rewards.items())},
        "reward": total.reward / total.answers,
        "training_reward": total.training / total.answers,
        "reward_spread": fmean(fmean(spread(rewards.values()) for rewards in by_agent) for by_agent in compared),
        "no_signal": (refilled.groups + without) / total.groups,
        "truncated": total.truncated / total.answers,
        "sampled_tokens": float(total.tokens),
    }


def _lengths(groups: list[Group]) -> dict[str, float]:
    lengths = sorted(trained_tokens(track) for group in groups for track in group.trajectories)
    return {
        "completion_len": fmean(lengths),
        "completion_len_p95": float(lengths[math.ceil(_TAIL * len(lengths)) - 1]),
        "completion_len_max": float(lengths[-1]),
    }


def _parts(state: State, number: int, groups: int, *, ages_limited: bool) -> dict[str, float]:
    """Return how the step came about: its parts, the ages of its tokens, and the groups that were dropped before."""
    parts, last = state.steps[number], state.steps[number][-1]
    ages, aged = Counter[int](), Counter[int]()
    for part in parts:
        for age, tokens in part.ages.items():
            ages[max(0, age)] += tokens
            aged[min(max(0, age), MAX_COUNTED_AGE)] += tokens
    figures = {f"{TOKENS_AGED}{age}": float(tokens) for age, tokens in sorted(aged.items())}
    figures |= {"parts": float(len(parts)), "token_age_run_max": float(last.max_age)}
    if ages:
        figures |= {"token_age_p50": float(_median(ages)), "token_age_max": float(max(ages))}
    if last.unscored:
        figures["unscored_groups"] = float(last.unscored)
        figures["unscored_share"] = last.unscored / (last.unscored + number * groups)
    if ages_limited:
        figures |= {"stale_groups": float(last.stale), "stale_share": last.stale / (last.stale + number * groups)}
    if by_guests := sum(state.groups[group].guest_tokens for group in state.groups_of(number)):
        figures[GUEST_TOKENS] = float(by_guests)
    return figures


def _run(state: State) -> dict[str, float]:
    """Return the figures of the run up to now: lengths of answers, and running episodes."""
    figures: dict[str, float] = {}
    counted = state.counted
    if counted.trained and counted.ended_tokens:
        mean = counted.ended_tokens / counted.ended
        figures["length_bias"] = counted.trained_tokens / counted.trained / mean
    if (recall := state.lengths.recall) is not None:
        figures["recall20"] = recall
    if state.lengths.separates:
        typical = state.lengths.typical.mean
        waiting = (group for group in state.groups.values() if group.bound is None and group.unscored)
        means = [group.created.expected for group in waiting if group.created.expected is not None]
        figures["long_groups"] = float(sum(mean > typical + math.log(2) for mean in means))
        figures["longest_expected"] = min(math.exp(max(means)), state.lengths.limit) if means else 0.0
    at_work = sum(track.is_at_work and not track.group.is_evaluated for track in state.trajectories.values())
    if at_work or state.episode_records.figures():
        figures[EPISODES_AT_WORK] = float(at_work)
    return figures


def _median(counts: Counter[int]) -> int:
    """Return the lower median of the keys, each weighted by its count."""
    before, half = 0, counts.total() / 2
    for value in sorted(counts):
        before += counts[value]
        if before >= half:
            return value
    raise ValueError("cannot compute the median: all counts are zero")
