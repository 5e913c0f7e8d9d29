"""Render the pace of a run: seconds of a step, ETTR, idle shares, rollout pools, tokens, episodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from rich.text import Text

from ...core.run_spec import RoleSpec
from ...core.text import plural, span
from ...core.types import GUEST_ROLE
from ...manager.model.figures.idle_times import START, RolePoint, idle_shares, rate
from ...manager.model.figures.step_times import seconds_per_step
from ...manager.model.figures.stream_figures import EpisodeFigures, StreamFigures
from ...manager.model.pools import LendingFigures, extras, lending_figures, pool_figures
from ...manager.model.queries import received_weights, weights_lag_steps
from ...manager.model.state import Evaluation, Replica, State
from .formatting import number

_SEPARATOR = " · "
_IDLE_CAUSES = {"store": "the store", "external": "external services"}
"""Texts of idle causes, if they differ from the cause's name."""
NO_DELTAS_SHARE = 0.99
"""Share of the bytes of the weights from which on no delta was sent, or next to none."""


def idle_text(name: str, shares: Mapping[str, float]) -> str:
    """Return a text about a role's idle share and idle causes; ``shares`` are by cause, largest first.

    Causes below half a percent are left out; shares of single causes are named if there are several.
    """
    causes = [(_IDLE_CAUSES.get(cause, cause), share) for cause, share in shares.items() if share >= 0.005]
    text = f"{name} {percent(sum(shares.values()))} idle"
    if not causes:
        return text
    several = len(causes) > 1
    return f"{text} (waits for {', '.join(f'{one} {percent(share)}' if several else one for one, share in causes)})"


def percent(share: float) -> str:
    """Format a share as whole percent."""
    return f"{100 * share:.0f} %"


def token_rate(per_second: float) -> str:
    """Format tokens per second with at most four digits."""
    return f"{per_second / 1000:.3g}k/s" if per_second >= 10_000 else f"{per_second:.0f}/s"


def idle_shares_of_roles(state: State) -> list[Text]:
    """Return the idle shares of trainer and rollouts over the last minutes, or over the whole of an ended run."""
    times = state.idle_times
    before = times.before if state.outcome is None else START
    found = ((role, idle_shares(times.now, before, role.name)) for role in _timed_roles(state))
    lending = lending_figures(state)
    texts = [
        idle_text(_plural(state, role), shares) + (lent_text(lending) if lending and role.traits.trains else "")
        for role, shares in found
        if role.name in times.now.roles
    ]
    return [Text(text) for text in (*texts, *([guests_text(lending)] if lending else []))]


def lent_text(lending: LendingFigures) -> str:
    """Return the end of a text about the trainer's time: how much of it was lent, and what a hand-over costs."""
    cost = "" if lending.hand_over_s is None else f" ({lending.hand_over_s:.2g} s a hand-over)"
    return f", {percent(lending.lent)} lent{cost}"


def guests_text(lending: LendingFigures) -> str:
    """Return how many guests have joined, and their share of the generated tokens."""
    if not lending.guests:
        return "goes on without guests (rrl explain)"
    return f"guests {lending.guests_at_work} of {lending.guests}, {percent(lending.guest_tokens)} of the tokens"


def token_rates(state: State) -> list[Text]:
    """Return the tokens per second that rollouts generated and the trainer trained on in the last minutes."""
    times, rates = state.idle_times, []
    now, before = times.now, times.before
    timed = [(role.name, _plural(state, role), role.traits.trains) for role in _timed_roles(state)]
    for role, name, trains in (*timed, (GUEST_ROLE, "guests", False)) if state.outcome is None else ():
        generated = now.roles.get(role, RolePoint()).done - before.roles.get(role, RolePoint()).done
        trained = now.trained_tokens - before.trained_tokens
        per_second = rate(trained if trains else generated, now, before)
        if per_second:
            rates.append(Text(f"{name} {token_rate(per_second)}"))
    return rates


def pool_texts(state: State, now: float) -> list[Text]:
    """Return how many rollouts of each pool work at ``now`` (manager's time, s), and how many of them on spares.

    The list is empty if the run has a single pool and none of its rollouts is on a spare.
    """
    pools, on_spares = state.job.kind("rollout"), extras(state)
    if len(pools) < 2 and not on_spares:
        return []
    texts = [_pool_text(state, role, now) for role in pools if role.replicas or role.is_elastic]
    return [*texts, *([Text(f"spares {on_spares} generating", "green")] if on_spares else [])]


def _pool_text(state: State, role: RoleSpec, now: float) -> Text:
    pool, details = pool_figures(state, role, now), []
    if role.is_elastic and pool.wanted != pool.at_work:
        details.append(f"wanted {pool.wanted}")
    if pool.queued_nodes and state.job.node_group_of(role.name).dedicated:
        details.append(f"{pool.queued_nodes} in the queue")
    if role.is_elastic:
        details.append(f"{_hours(pool.spent_node_s)} of {_hours(pool.budget_node_s)} node hours")
    if pool.held is not None:
        details.append("held by a user")
    fixed = f"{_plural(state, role)} {min(pool.at_work, role.replicas)} of {role.replicas}"
    text = f"{role.name} {pool.at_work}" if role.is_elastic else fixed
    return Text(f"{text} ({', '.join(details)})" if details else text)


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f}" if hours >= 10 else f"{round(hours, 2):g}"


class Pace(Struct, frozen=True):
    """How fast a run trains; each figure is None while it is unknown."""

    seconds_per_step: float | None
    seconds_left: float | None
    """Seconds until the last step at this pace; None once the end of the run is decided, and without a manager."""
    ettr: float | None
    """Effective training time ratio of the run (docs/report.md); None until one step is undisturbed."""
    weights_lag_steps: int | None
    """Training steps by which the rollout with the oldest weights is behind the trainer."""
    weights_received_share: float | None
    """Bytes that the rollouts have received of their newest weight versions, over the size of these versions; little if
    deltas are sent."""
    delta_fallbacks: int
    """Deltas that did not result in the right bytes, so that the current rollouts requested whole chunks."""


def pace_of(state: State, now: float, frozen: bool = False) -> Pace:
    """Return how fast a run trains at ``now`` (wall clock, s), or trained until its end.

    With ``frozen``, no manager records the run's progress any more, and ``seconds_left`` is unknown.
    """
    step_s, lag = seconds_per_step(state.commits), weights_lag_steps(state)
    return Pace(
        step_s,
        step_s * (state.job.steps - state.step) if step_s is not None and state.finish is None and not frozen else None,
        state.ettr,
        None if lag is None else lag[1],
        *received_weights(state.workers),
    )


def delta_figures(replicas: Iterable[Replica]) -> list[Text]:
    """Return how much deltas send of the newest weight versions, and the number of wrong deltas; nothing without."""
    share, fallbacks = received_weights(replicas)
    found = [] if share is None or share >= NO_DELTAS_SHARE else [Text(f"deltas of {100 * share:.2g} % of the bytes")]
    return [*found, *([Text(plural(fallbacks, "delta fallback"), "yellow")] if fallbacks else [])]


def progress_figures(state: State, now: float, frozen: bool = False) -> list[Text]:
    """Return how fast the run trains: seconds of a step, time left, and effective training time (ETTR).

    ``now`` is the manager's time (s). The list is empty before the second step, and in a run that has only commands.
    """
    if not state.job.steps:
        return []
    found, pace = [], pace_of(state, now, frozen)
    if (seconds := pace.seconds_per_step) is not None:
        found.append(Text(f"{seconds:.3g} s a step" if seconds < 1000 else f"{span(seconds)} a step"))
        if pace.seconds_left is not None and state.outcome is None and state.step < state.job.steps:
            found.append(_time_left(pace.seconds_left, state.ends_at - now))
    if state.step:
        found.append(Text(f"ETTR {'–' if pace.ettr is None else percent(pace.ettr)}"))
    return found


def _time_left(seconds: float, walltime_s: float) -> Text:
    """Return the time that the remaining steps take, with a warning if the run's walltime ends first."""
    text = f"{span(seconds)} left"
    return Text(text) if seconds <= walltime_s else Text(f"{text}, walltime ends in {span(walltime_s)}", "yellow")


def length_figures(figures: StreamFigures) -> list[Text]:
    """Return texts about the lengths of answers as of the newest step."""
    found: list[Text] = []
    if figures.length_bias is not None:
        found.append(Text(f"trained answers {figures.length_bias:.2f} of the mean"))
    if figures.longest_expected:
        text = f"longest expected {figures.longest_expected} tokens"
        groups = "group" if figures.long_groups == 1 else "groups"
        found.append(Text(f"{figures.long_groups} long {groups}, {text}" if figures.long_groups else text))
        if figures.recall20 is not None:
            found.append(Text(f"{percent(figures.recall20)} of the longest fifth foreseen"))
    return found


def evaluation_figures(evaluations: Sequence[Evaluation]) -> list[Text]:
    """Return the result of the newest evaluation, compared with the first evaluation; empty if there is none."""
    if not evaluations:
        return []
    newest, first = evaluations[-1], evaluations[0]
    found = [Text(f"step {newest.step}")]
    for name in ("pass@1", "reward"):
        if name in newest.metrics:
            before = f" ({number(first.metrics[name])} at step {first.step})"
            compared = before if first.step < newest.step and name in first.metrics else ""
            found.append(Text(f"{name} {number(newest.metrics[name])}{compared}"))
    if "completion_len" in newest.metrics:
        found.append(Text(f"{newest.metrics['count']:.0f} answers of {newest.metrics['completion_len']:.0f} tokens"))
    if truncated := newest.metrics.get("truncated"):
        found.append(Text(f"{percent(truncated)} truncated"))
    if unscored := newest.metrics.get("unscored"):
        found.append(Text(f"{unscored:.0f} without a score", "yellow"))
    return found


def agent_figures(figures: EpisodeFigures, ended: bool) -> list[Text]:
    """Return the counts of episodes and of turns as of the newest step. A run without agents has no such figures."""
    if figures == EpisodeFigures():
        return []
    counts = [(figures.finished, "finished") if ended else (figures.at_work, "at work")]
    counts += [(figures.replayed, "replayed"), (figures.retried, "begun again"), (figures.dropped, "dropped")]
    texts = [f"{count:,} {word}" for index, (count, word) in enumerate(counts) if count or not index]
    found = [Text(", ".join(texts)), Text(f"turns {figures.turns:,}")]
    if figures.finished:
        branches = f"{figures.branches_each:.3g}"
        found.append(Text(f"{branches} {'branch' if branches == '1' else 'branches'} each"))
    if figures.untrained_turns:
        found.append(Text(f"{figures.untrained_turns:,} turns not trained", "yellow"))
    if figures.token_drift:
        found.append(Text(f"{figures.token_drift:,} tokens trained in a wrong context: a bug of rrl", "red"))
    return found


def _timed_roles(state: State) -> list[RoleSpec]:
    """Return the roles that determine the pace of the run: trainer and rollouts."""
    return [role for role in state.job.roles if role.traits.has_weights]


def _plural(state: State, role: RoleSpec) -> str:
    """Return what the replicas of a role are called; a further pool has a name of its own."""
    named = role.replicas == 1 or state.job.node_group_of(role.name).dedicated
    return role.name if named else f"{role.name}s"


def packed(label: str, parts: Sequence[Text], width: int) -> Iterator[tuple[str, Text]]:
    """Yield rows (label, text), each with as many parts as fit ``width``; only the first row has the label."""
    row: Text | None = None
    for part in parts:
        if row is not None and len(row) + len(_SEPARATOR) + len(part) <= width:
            row = Text.assemble(row, _SEPARATOR, part)
            continue
        if row is not None:
            yield label, row
            label = ""
        row = part
    if row is not None:
        yield label, row
