"""Render the episodes of a run as a table, and one episode as a tree of turns. The functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from ...core.text import on_one_line
from .episode_trees import Episode, TurnNode
from .formatting import number, plain_table

_COLOUR = {"at work": "cyan", "unscored": "yellow", "awaits reward": "yellow", "scored": "green", "trained": "green"}
_GUIDE = "bright_black"


def episodes_view(episodes: Sequence[Episode]) -> RenderableType:
    """Return a table of episodes, and how many are in each state."""
    table = plain_table(right=["episode", "item"])
    table.add_column("state", no_wrap=True)
    for name in ("attempt", "turns", "branches", "sampled", "weights", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in episodes:
        table.add_row(
            str(one.episode),
            str(one.item),
            Text(_listed(one), _COLOUR.get(one.state, _GUIDE)),
            str(one.attempt or "–"),
            str(len(one.turns)),
            str(one.branches),
            str(one.sampled),
            versions_text(one.versions),
            number(one.reward),
        )
    counts = Counter(map(_listed, episodes))
    return Group(table, "", Text(", ".join(f"{count} {state}" for state, count in counts.most_common()), _GUIDE))


def episode_view(episode: Episode) -> RenderableType:
    """Return one episode with its turns, each below the turn whose path it continues or leaves."""
    title = Text(f"episode {episode.episode}", "bold")
    title.append(f"  ● {_state(episode)}", _COLOUR.get(episode.state, "none"))
    group = "of the evaluation" if episode.split == "eval" else f"group {episode.group}"
    title.append(f"   item {episode.item}, {group}", "none")
    title.append(f"   {_attempt(episode)}", "none")
    if episode.reward is not None:
        named = ", ".join(f"{on_one_line(name)} {number(reward)}" for name, reward in episode.rewards.items())
        title.append(f"   reward {number(episode.reward)}{f' ({named})' if named else ''}", "none")
    tree = Tree(title, guide_style=_GUIDE)
    branches: dict[int | None, Tree] = {None: tree}
    several = len({turn.agent for turn in episode.turns}) > 1
    for turn in episode.turns:  # a parent's number is smaller than its children's
        branches[turn.number] = branches[turn.parent].add(_turn(turn, named=several))
    if not episode.turns:
        tree.add(Text("no turn yet", _GUIDE))
    total = f"{episode.given} tokens given, {episode.sampled} sampled"
    total += "" if episode.trained is None else f", {episode.trained} of these trained"
    return Group(tree, Text(f"{total}; {_plural(episode.branches, 'branch', 'branches')}", _GUIDE))


def versions_text(versions: Sequence[int]) -> str:
    """Return the weight versions that sampled tokens as text: ``v3``, ``v3–v5``; a dash for none."""
    if not versions:
        return "–"
    return f"v{versions[0]}" if versions[0] == versions[-1] else f"v{versions[0]}–v{versions[-1]}"


def _listed(episode: Episode) -> str:
    return f"{episode.state} (eval)" if episode.split == "eval" else episode.state


def _state(episode: Episode) -> str:
    if episode.step is None:
        return episode.state
    return f"trained in step {episode.step}" if episode.state == "trained" else f"in the batch of step {episode.step}"


def _attempt(episode: Episode) -> str:
    if not episode.attempt:
        return "no attempt yet"
    failed = f", {episode.failures} failed" if episode.failures else ""
    by = "" if episode.holder is None else f" by {'an outside agent, opened at ' * episode.outside}{episode.holder}"
    return f"attempt {episode.attempt}{by}{failed}"


def _turn(turn: TurnNode, *, named: bool) -> Text:
    text = Text(f"turn {turn.number}{f' of {on_one_line(turn.agent)}' if named else ''}", "cyan")
    if turn.parent is not None and turn.offset < turn.parent_length:
        branch = f"  branches off turn {turn.parent} after {turn.offset} of its {turn.parent_length} tokens"
        text.append(branch, "yellow")
    by = f" by {versions_text(turn.versions)}" if turn.sampled else ""
    text.append(f"  given {turn.given}, sampled {turn.sampled}{by}", "none")
    if not turn.finished:
        text.append(" so far", "none")
    text.append(*_use(turn))
    return text


def _use(turn: TurnNode) -> tuple[str, str]:
    """Return how the sampled tokens of a turn are used, and the style of the text."""
    if turn.foreign:
        return "  context: its call is not trained", "yellow"
    if turn.recorded:
        return "  of an earlier attempt, not replayed yet", "yellow"
    if turn.trained is None:
        return "", "none"
    if turn.trained == turn.sampled:
        return "  trained", "green"
    return f"  {turn.trained} trained, {turn.sampled - turn.trained} context", "yellow"


def _plural(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
