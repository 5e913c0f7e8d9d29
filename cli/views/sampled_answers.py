"""Render samples of a step: scores, prompt and answer, or the conversation of an agent. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ...api.sampled_steps import SamplesDocument
from ...core.sample_texts import DecodedSample, Turn
from ...core.text import escaped_lines
from .episodes import versions_text
from .formatting import number


class PageSamples(Struct, frozen=True):
    """The samples in the page of a report."""

    samples: Sequence[tuple[int, DecodedSample]] = ()
    """Samples with their steps, in order."""
    kept: int = 0
    """Number of steps of which the run has samples."""
    missing: str = ""
    """Why the samples cannot be shown; empty if they are shown or if there are none."""


_INDENT = (0, 0, 0, 2)


def samples_view(found: SamplesDocument) -> RenderableType:
    """Return samples one below the other."""
    shown = len({one.trajectory for one in found.samples})
    title = Text(f"step {found.step} of {found.run}", "bold")
    title.append(f"   {shown} of {found.trajectories} trajectories", "none")
    views: list[RenderableType] = [title]
    for one in found.samples:
        views += ["", _scores(one), *_turns(one)]
    if found.kept < found.trajectories and shown < found.kept:
        views += ["", Text(f"only {found.kept} trajectories of the step are kept", "bright_black")]
    return Group(*views)


def scores_of(sample: DecodedSample) -> list[tuple[str, str]]:
    """Return the scores of a sample, and what else is known of it, as (name, value)."""
    parts = ", ".join(f"{name} {number(value)}" for name, value in sample.parts.items())
    rows = [
        ("trajectory", str(sample.trajectory)),
        ("group", str(sample.group)),
        ("item", f"{sample.item} of {sample.source}" if sample.source else str(sample.item)),
        ("agent", escaped_lines(sample.agent)),
        ("reward", number(sample.reward) + (f" ({parts})" if parts else "")),
        ("trained", number(sample.training_reward) if sample.training_reward != sample.reward else ""),
        ("advantage", f"{sample.advantage:+.2f}" if sample.advantage is not None else ""),
        ("age", str(sample.age)),
        ("weights", versions_text(sample.versions)),
        ("truncated", "yes" if sample.truncated else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _scores(sample: DecodedSample) -> Text:
    text = Text()
    for name, value in scores_of(sample):
        text.append(f"{name} ", "bright_black")
        text.append(f"{value}   ", "bold cyan" if name == "reward" else "yellow" if name == "truncated" else "none")
    return text


def _turns(sample: DecodedSample) -> Iterator[RenderableType]:
    for index, turn in enumerate(sample.turns):
        yield Text(_name(index, turn, len(sample.turns)), "green" if turn.sampled else "bright_black")
        text = escaped_lines(turn.text) if turn.text or not turn.tokens else " ".join(map(str, turn.tokens))
        yield Padding(Text(text, "none" if turn.sampled else "bright_black"), _INDENT)


def _name(index: int, turn: Turn, count: int) -> str:
    if not index and not turn.sampled:
        return "prompt"
    if not turn.sampled:
        return "given"
    return "answer" if turn.trained else "answer (not trained here)"
