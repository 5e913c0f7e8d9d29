"""What the model answered in a committed step, for ``rrl samples`` and :meth:`rrl.Run.samples`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from ..core.run_dir import RunDir, errors_about
from ..core.run_spec import RunSpec, SamplesSpec
from ..core.sample_texts import Decode, DecodedSample, decoded
from ..core.samples_file import StepSamples, read_steps
from ..core.types import OperationFailed, UsageError
from ..roles.models.tokenizer import open_tokenizer
from ..roles.trajectories.durable.log import LogDamaged, read_frames, read_newest
from ..roles.trajectories.durable.records import LogFormatError, decode
from ..roles.trajectories.durable.state import State
from ..roles.trajectories.sample_writer import step_samples
from .runs import job_of

MAX_RANGES = 8
"""Maximum number of ranges of steps in a message."""


class SamplesDocument(Struct, frozen=True):
    """Samples of a committed step."""

    run: str
    step: int
    trajectories: int
    """Number of trajectories that the step trained."""
    kept: int
    """Number of these that are still known, of which ``samples`` has those that were asked for."""
    samples: list[DecodedSample]


class Selection(Struct, frozen=True):
    """Which samples of a step are shown; all that are kept by default."""

    best: int | None = None
    """Number of trajectories with the highest rewards."""
    worst: int | None = None
    group: int | None = None
    grep: str | None = None
    """Text in the prompt or the answer, in lower or upper case."""

    def of(self, samples: Sequence[DecodedSample]) -> list[DecodedSample]:
        """Return the selected samples: those with the highest or the lowest rewards first."""
        found = [one for one in samples if self.group in (None, one.group)]
        if self.grep is not None:
            text = self.grep.casefold()
            found = [one for one in found if text in one.prompt.casefold() or text in one.answer.casefold()]
        count = self.worst if self.best is None else self.best
        if count is None:
            return found
        found.sort(key=lambda one: one.reward, reverse=self.best is not None)
        shown = set(list(dict.fromkeys(one.trajectory for one in found))[:count])
        return [one for one in found if one.trajectory in shown]


def samples_of(run: RunDir, step: int | None, selection: Selection, *, tokens: bool) -> SamplesDocument:
    """Return samples of a committed step, by default of the newest one; with ``tokens``, tokens instead of text.

    Raises:
        UsageError: The step is not committed or no samples of it are kept, or the arguments exclude each other.
        OperationFailed: The samples cannot be read, or the tokenizer cannot be opened here.
    """
    if selection.best is not None and selection.worst is not None:
        raise UsageError("best and worst exclude each other; give one of them")
    if selection.grep is not None and tokens:
        raise UsageError("grep looks for text, and with tokens there is none; give one of them")
    job = job_of(run)
    if job is None:
        raise OperationFailed(f"{run.run_spec} cannot be read; without it nothing is known of the run's samples")
    found = _find(run, job, step, everything=selection != Selection())
    selected = selection.of(decoded(found, None if tokens else text_decoder(run, job)))
    if selection.group is not None and not selected:
        groups = sorted({one.group for one in found.samples})
        raise UsageError(
            f"step {found.step} of {run.id} has no group {selection.group}; it has groups {_ranges(groups)}"
        )
    kept = len({one.trajectory for one in found.samples})
    return SamplesDocument(run.id, found.step, found.trajectories, kept, selected)


def text_decoder(run: RunDir, job: RunSpec) -> Decode:
    """Return a function that decodes tokens of a run. Raises OperationFailed if the tokenizer cannot be opened here."""
    try:
        return open_tokenizer(job.model).describe
    except (ValueError, OSError, ImportError) as error:
        problem = f"the tokenizer of {run.id} cannot be opened here: {error}"
        raise OperationFailed(f"{problem}; to see the tokens: rrl samples {run.id} --tokens") from None


def _find(run: RunDir, job: RunSpec, step: int | None, *, everything: bool) -> StepSamples:
    """Return the samples of a step: ``everything`` that is known of it, or those that the store has chosen."""
    if not job.kind("trajectories"):
        raise UsageError(f"{run.id} has no samples: its job has no [task]")
    with errors_about(run.samples):
        kept, chosen = read_steps(run.samples, lambda steps: steps[-1:] if step is None else [step])
    if chosen and not everything:
        return chosen[0]
    state = read_store(run, job)  # it has all trajectories of the newest steps
    committed = 0 if state is None else state.committed
    wanted = step if step is not None else kept[-1] if kept else committed
    if state is not None and wanted in state.steps and wanted <= committed:
        count = None if everything else job.samples.per_step or SamplesSpec().per_step
        return step_samples(job, wanted, [state.groups[group] for group in state.groups_of(wanted)], count)
    if chosen:
        return chosen[0]
    newest = max([committed, *kept])
    if not newest:
        raise UsageError(f"{run.id} has no committed step yet")
    if wanted > newest:
        raise UsageError(f"step {wanted} of {run.id} is not committed; its newest committed step is {newest}")
    there = sorted({*kept, *(one for one in (state.steps if state is not None else ()) if one <= committed)})
    raise UsageError(f"no samples of step {wanted} of {run.id} are kept; kept are steps {_ranges(there) or 'none'}")


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``1-4, 8, ... and 12 up to 96``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in found]
    if len(texts) > MAX_RANGES:
        texts[MAX_RANGES // 2 : -MAX_RANGES // 2] = ["..."]
    return ", ".join(texts)


def read_store(run: RunDir, job: RunSpec) -> State | None:
    """Return the state that the newest log of the store describes; None before the store has written one.

    The state has every group that the log still contains, even if the store itself has already retired it.

    Args:
        run: The run directory.
        job: Its run spec.

    Raises:
        UsageError: The log is damaged, or was written by another version of rrl.
        OperationFailed: The log cannot be read.
    """
    try:
        with errors_about(run.store):
            return read_newest(run.store, lambda path: _state(path, job))
    except LogDamaged as error:
        raise UsageError(str(error)) from None
    except LogFormatError as error:
        raise UsageError(f"the trajectory log in {run.store} {error}") from None


def _state(path: Path, job: RunSpec) -> State:
    state = State(retained_steps=sys.maxsize, max_new_tokens=job.sampling.max_new_tokens)
    for payload in read_frames(path):
        state.apply(decode(payload))
    return state
