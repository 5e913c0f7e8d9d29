"""Samples of a step (:mod:`.samples_file`) as text, for people and programs. The functions are pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import groupby

from msgspec import Struct

from .samples_file import Sample, StepSamples
from .text import escaped_lines

MAX_TEXT_CHARS = 4000
"""Maximum number of characters of a prompt or answer in a page or table; longer ones lack their middle."""

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens."""


class Turn(Struct, frozen=True):
    """Consecutive tokens of a sample that were all given, or all sampled."""

    sampled: bool
    """True if the model sampled the tokens; False if they were given, for example the result of a tool."""
    trained: bool
    """True if the tokens are trained in this sample."""
    text: str
    """Empty with ``--tokens``."""
    tokens: tuple[int, ...] = ()
    """Only with ``--tokens``."""


class DecodedSample(Struct, frozen=True):
    """One trajectory of a step or, with agents, one path through the turns of an episode."""

    trajectory: int
    group: int
    item: int
    """Index of the prompt in the task."""
    source: str
    """Name of the prompt file; empty if the task has only one source."""
    reward: float
    training_reward: float
    """The reward that the trainer learns from."""
    parts: dict[str, float]
    """The rewards of which ``reward`` is the weighted sum, by name; empty if there is only one."""
    advantage: float | None
    """Advantage over the group, as the built-in trainer computes it; None if the trajectory is left out there, or with
    a trainer of your own."""
    truncated: bool
    """True if the limit on its length cut an answer of the sample."""
    age: int
    """Age of the oldest trained token, in training steps."""
    versions: tuple[int, ...]
    """Training steps of the weights that sampled tokens of the sample."""
    turns: tuple[Turn, ...]
    """The prompt and the answer or, with agents, the whole conversation: given and sampled tokens in turn."""
    agent: str = ""
    """The agent whose tokens the sample trains, with its reward, in a group with rewards by name."""

    @property
    def prompt(self) -> str:
        """Return the text before the first sampled token."""
        return "".join(turn.text for turn in self.turns[:1] if not turn.sampled)

    @property
    def answer(self) -> str:
        """Return the text from the first sampled token on, in which later given tokens stand in brackets."""
        rest = self.turns[1:] if self.turns and not self.turns[0].sampled else self.turns
        return "".join(turn.text if turn.sampled else f"\n[given: {turn.text}]\n" for turn in rest)


def decoded(samples: StepSamples, decode: Decode | None) -> list[DecodedSample]:
    """Return the samples of a step with their texts; with their tokens if ``decode`` is None."""
    return [_decoded(one, samples.step, decode) for one in samples.samples]


def _decoded(sample: Sample, step: int, decode: Decode | None) -> DecodedSample:
    tokens, turns, at = array("i", sample.tokens), [], 0
    for (sampled, trained), runs in groupby(sample.runs, lambda run: (run.step >= 0, run.trained)):
        end = at + sum(run.length for run in runs)
        own = tuple(tokens[at:end])
        turns.append(Turn(sampled, trained, "", own) if decode is None else Turn(sampled, trained, _text(own, decode)))
        at = end
    steps = [run.step for run in sample.runs if run.step >= 0]
    trained_steps = [run.step for run in sample.runs if run.trained]
    return DecodedSample(
        sample.trajectory,
        sample.group,
        sample.item,
        sample.source,
        sample.reward,
        sample.training,
        sample.parts,
        sample.advantage,
        sample.truncated,
        step - 1 - min(trained_steps, default=step - 1),
        tuple(sorted(set(steps))),
        tuple(turns),
        sample.agent,
    )


def _text(tokens: Sequence[int], decode: Decode) -> str:
    try:
        return decode(tokens)
    except Exception:  # a rollout of the user's own may append ids that its tokenizer does not know
        return " ".join(f"<{token}>" for token in tokens)


def shortened_lines(text: str) -> str:
    """Return a prompt or answer without control characters, and without its middle if it is long."""
    text, half = escaped_lines(text), MAX_TEXT_CHARS // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters are left out]\n{text[-half:]}"
