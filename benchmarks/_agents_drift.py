"""Checks that a run of examples/agents_smollm2.toml trains the sampled tokens with their log-probabilities.

Tokens and contexts are compared with what the engines recorded (:mod:`._recorded`). Log-probabilities are compared with
those that torch computes from the checkpoints of the versions that the tokens name.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from msgspec import Struct
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from rrl.benchmarks import _recorded
from rrl.benchmarks._recorded import Trained
from rrl.core.launch import read_run_spec
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec
from rrl.core.types import Outcome
from rrl.roles.checkpoints.stored_tensors import WEIGHTS_PREFIX
from rrl.roles.models.policy import build_model, log_probs
from rrl.roles.models.tokenizer import open_tokenizer
from rrl.roles.trainer.checkpoint import read_tensors
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import StepCommitted, TurnCreated, decode
from rrl.tests.support.runs import TestRun, check_sound, submit_here

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 6
RUN_TIMEOUT_S = 3600.0
"""Deadline (s) of the run. On two quiet cores, the run takes a tenth of this time."""
_AT_ONCE = 4
"""Number of samples in one forward pass."""


class Drift(Struct, frozen=True):
    """The results of a run."""

    trained_tokens: int
    token_drift: int
    """Number of trained tokens that no engine sampled after the same tokens, with the same log-probability and
    version."""
    max_logprob_error: float
    """Largest difference (nats) between a trained token's log-probability and torch's log-probability."""
    versions: int
    """Number of versions that sampled trained tokens."""
    samples: int
    samples_of_several_versions: int
    """Number of samples whose trained tokens were sampled by more than one version."""
    turns_of_several_versions: int
    """Number of answers during which the weights changed."""
    turns: int
    episodes: int
    """Number of trained episodes. Each leaf of the tree of an episode's turns is one sample."""
    text_would_change: float
    """Share of the answers whose tokens change when the answer is decoded and encoded again."""
    answers: int
    reward: float
    """Mean reward."""
    run_s: float
    load: tuple[float, float]
    """Load of this machine (1 minute) at the start and the end of the run."""


def measure(folder: Path, steps: int = STEPS) -> Drift:
    """Run the example in ``folder``, and compare the trained tokens with the sampled tokens."""
    torch.set_num_threads(1)
    record = folder / "record"
    record.mkdir(parents=True)
    (folder / "sums_agent.py").write_text((EXAMPLES / "sums_agent.py").read_text())
    load_before, started = os.getloadavg()[0], time.monotonic()
    run = submit_here(folder, job(steps, record))
    state = run.wait_end(RUN_TIMEOUT_S)
    assert (state.outcome, state.step) == (Outcome.COMPLETED, steps), f"{state.outcome} at {state.step}: {state.why}"
    run_s = time.monotonic() - started
    run.wait_gone(120)
    check_sound(run.run)
    return _read(run, record, run_s, load_before)


def job(steps: int, record: Path) -> str:
    """Return the job.toml of the example, changed to this number of steps and to keep every checkpoint."""
    toml = (EXAMPLES / "agents_smollm2.toml").read_text()
    lines = [f"steps = {steps}" if line.startswith("steps = ") else line for line in toml.splitlines()]
    for role, more in (("trainer", [f"keep_checkpoints = {steps + 1}"]), ("rollout", [])):
        command = json.dumps([sys.executable, "-m", "rrl.benchmarks._recorded", role, "--record", str(record)])
        at = lines.index(f"[roles.{role}]") + 1
        lines[at:at] = [f"command = {command}", *more]
    return "\n".join(lines) + "\n"


def _read(run: TestRun, record: Path, run_s: float, load_before: float) -> Drift:
    spec = read_run_spec(run.run.run_spec)
    samples, (differing, tokens) = _recorded.trained(record), _recorded.drift(record)
    changed, answers = _recorded.text_changes(record, open_tokenizer(spec.model))
    rewards = {each.episode: each.reward for each in samples}
    return Drift(
        tokens,
        differing,
        max(_errors(run.run, spec, samples)),
        len(_trained_steps(samples)),
        len(samples),
        sum(len(_trained_steps([each])) > 1 for each in samples),
        _recorded.answers_of_several_versions(record),
        sum(isinstance(each, TurnCreated) for each in _log(run.run)),
        len(rewards),
        round(changed / answers, 4),
        answers,
        round(statistics.mean(rewards.values()), 4),
        round(run_s, 1),
        (round(load_before, 1), round(os.getloadavg()[0], 1)),
    )


def _log(run: RunDir) -> Iterator[object]:
    """Yield the records of the newest log of the store."""
    return map(decode, read_frames(max(run.store.glob("log.*[0-9]"), key=lambda path: int(path.suffix[1:]))))


# ── log-probabilities ──────────────────────────────────────────────────────────────────────────────────────────────
def _trained_steps(samples: Sequence[Trained]) -> set[int]:
    """Return the steps of the versions that sampled trained tokens."""
    return {
        version.step for each in samples for version, counts in zip(each.versions, each.counts, strict=True) if counts
    }


def _errors(run: RunDir, spec: RunSpec, samples: Sequence[Trained]) -> Iterator[float]:
    """Yield the largest error of a log-probability (nats) for each sample and each version in it."""
    manifests = {each.number: each.manifest for each in _log(run) if isinstance(each, StepCommitted)}
    model = build_model(spec.model, open_tokenizer(spec.model).size, spec.seed)
    for step in sorted(_trained_steps(samples)):
        if step:  # version 0 is the model's folder
            state = {f"{WEIGHTS_PREFIX}{name}": parameter for name, parameter in model.named_parameters()}
            read_tensors(state, run.path / manifests[step]["folder"], manifests[step]["files"])
        chosen = [each for each in samples if step in _trained_steps([each])]
        for start in range(0, len(chosen), _AT_ONCE):
            yield from _errors_under(model, chosen[start : start + _AT_ONCE], step, spec.sampling.temperature)


@torch.no_grad()
def _errors_under(model: nn.Module, samples: Sequence[Trained], step: int, temperature: float) -> Iterator[float]:
    rows = [torch.tensor([*each.prompt, *each.tokens]) for each in samples]
    logits = model(input_ids=pad_sequence(rows, batch_first=True), use_cache=False).logits  # causal: padding is unseen
    for each, row, found in zip(samples, rows, logits, strict=True):
        start = len(each.prompt)
        every = log_probs(found[start - 1 : len(row) - 1], temperature)
        of_tokens = every.gather(1, row[start:, None])[:, 0]
        mask = torch.tensor(
            [counts and version.step == step for version, counts in zip(each.versions, each.counts, strict=True)]
        )
        yield float((of_tokens - torch.tensor(each.logprobs)).abs()[mask].max())
