"""``rrl samples``, and the samples in the page of a report."""

from __future__ import annotations

from collections.abc import Sequence

from ...api.runs import find_run, job_of
from ...api.sampled_steps import Selection, samples_of, text_decoder
from ...core.run_dir import RunDir, errors_about
from ...core.sample_texts import decoded
from ...core.samples_file import read_steps
from ..common.output import print_json, show
from ..views.sampled_answers import PageSamples, samples_view

MAX_PAGE_SAMPLES = 1000
"""Maximum number of samples in a page."""


def samples(name: str | None, step: int | None, selection: Selection, *, tokens: bool, json: bool) -> int:
    """Print samples of a committed step; returns exit code 0. Raises the exceptions of :func:`samples_of`."""
    found = samples_of(find_run(name), step, selection, tokens=tokens)
    if json:
        print_json(found)
    else:
        show(samples_view(found))
    return 0


def page_samples(run: RunDir) -> PageSamples:
    """Return samples for the page of a report: those of steps at equal distances, and of the newest one.

    Raises OperationFailed if they cannot be read, or if the tokenizer cannot be opened here.
    """
    if (job := job_of(run)) is None:
        return PageSamples()
    count = max(1, MAX_PAGE_SAMPLES // max(1, job.samples.per_step))
    with errors_about(run.samples):
        kept, found = read_steps(run.samples, lambda steps: _at_equal_distances(steps, count))
    if not kept:
        return PageSamples()
    decode = text_decoder(run, job)
    samples = [(one.step, sample) for one in found for sample in decoded(one, decode)]
    return PageSamples(samples[-MAX_PAGE_SAMPLES:], len(kept))


def _at_equal_distances(steps: Sequence[int], count: int) -> list[int]:
    """Return at most ``count`` of the steps, from the newest one backwards."""
    distance = max(1, -(-len(steps) // count))
    return list(steps[::-1][::distance])
