"""vLLM as a rollout's engine, in this process: a step is one of its scheduler's, and new weights come between two.

With tensor parallelism vLLM starts worker processes beside it. They are of our process group and end with the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from ....core.types import Version
from ...models.policy import fitting
from ...trajectories.types import Item, Segment
from ..engine import Sampling, StepOutput
from .weight_transfer import BUCKET_BYTES, buckets, shared_bucket

HAND_OVER_INTERVAL_S = 0.1
"""s between two times that complete trajectories alone are handed over: each is a round trip to the store, while the
model stands still. Those that wait for it leave their places empty for so long."""
_PROBE = "probe"
_COMPLETION_REASONS = ("stop", "length")
"""the reasons to finish that are a trajectory's own end"""


class VllmEngine:
    """``config``: of :func:`rrl.roles.rollout.vllm.config.configure`; ``model``: as transformers builds it, for names
    and shapes (the meta device will do); ``ends``: tokens that end a trajectory; ``lease``: the most that it takes at
    once."""

    def __init__(
        self, config: Any, model: nn.Module, *, stop_tokens: frozenset[int], sampling: Sampling, lease: int
    ) -> None:
        if sampling.greedy and sampling.temperature != 1.0:
            raise ValueError("vLLM records greedy log-probabilities at temperature 1 only")
        self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._model = model
        self._is_single_process = config.parallel_config.world_size == 1
        self._max_sequences: int = config.scheduler_config.max_num_seqs
        self._max_length: int = config.model_config.max_model_len
        self._lease, self._stop_tokens, self._sampling = lease, sorted(stop_tokens), sampling
        self._version: Version | None = None
        self._running: dict[int, _RunningTrajectory] = {}
        self._segments: list[Segment] = []
        """whole segments, not handed over yet"""
        self._finished: list[int] = []
        """complete trajectories, not reported yet"""
        self._handed_over_at = time.monotonic()
        self._tokens = 0
        """that came out of vLLM, in all"""

    @property
    def free_slots(self) -> int:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        return max(0, min(self._lease, self._max_sequences - len(self._running)))

    @property
    def has_work(self) -> bool:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        return bool(self._running or self._segments or self._finished)

    def add(self, items: Sequence[Item]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`. A trajectory also ends where the model's length does."""
        for item in items:
            grown = [token for segment in item.so_far for token in segment.tokens]
            tokens = [*item.prompt, *grown]
            left = min(item.max_new, self._max_length - len(tokens))
            if left <= 0 or (grown and grown[-1] in self._stop_tokens):
                self._finished.append(item.trajectory)
                continue
            self._running[item.trajectory] = _RunningTrajectory(item.trajectory, len(grown))
            self._submit(str(item.trajectory), tokens, left)

    def _submit(self, name: str, tokens: list[int], max_new: int) -> None:
        how = SamplingParams(
            temperature=0.0 if self._sampling.greedy else self._sampling.temperature,
            max_tokens=max_new,
            stop_token_ids=self._stop_tokens,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._llm.add_request(name, tokens_input(tokens), how)

    def step(self) -> StepOutput:
        """See :class:`rrl.roles.rollout.engine.Engine`. Whatever is due is handed over: segments once they are
        ``segment_tokens`` long; those that complete a trajectory with them, or after :data:`HAND_OVER` s, or when
        nothing runs any more."""
        if self._version is None:
            raise RuntimeError("no weights were loaded yet")
        if self._running:
            self._advance()
        late = time.monotonic() >= self._handed_over_at + HAND_OVER_INTERVAL_S
        due = any(len(one.tokens) >= self._sampling.segment_tokens for one in self._running.values())
        if not (due or not self._running or (late and self._finished)):
            return [], []
        for one in self._running.values():
            if len(one.tokens) >= self._sampling.segment_tokens:
                self._close_segment(one)
        return self._hand_over()

    def flush(self) -> StepOutput:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        for one in self._running.values():
            self._close_segment(one)
        return self._hand_over()

    def _hand_over(self) -> StepOutput:
        made, finished, self._segments, self._finished = self._segments, self._finished, [], []
        self._handed_over_at = time.monotonic()
        return made, finished

    def _advance(self) -> None:
        """One step of vLLM's scheduler."""
        for output in self._llm.step():
            (only,) = output.outputs
            for token, found in zip(only.token_ids, only.logprobs or (), strict=True):
                logprob = found[token].logprob
                if not math.isfinite(logprob):
                    raise RuntimeError(f"the model with weights {self._version} gives log-probability {logprob}")
                self._tokens += 1
                if (one := self._running.get(_trajectory(output.request_id))) is not None:
                    one.tokens.append(token)
                    one.logprobs.append(logprob)
            if output.finished:
                self._on_finished(_trajectory(output.request_id), only.finish_reason)

    def _on_finished(self, trajectory: int, reason: str | None) -> None:
        if reason not in _COMPLETION_REASONS:
            raise RuntimeError(f"vLLM gave up trajectory {trajectory}: {reason}")
        if (one := self._running.pop(trajectory, None)) is not None:
            self._close_segment(one)
            self._finished.append(trajectory)

    def _close_segment(self, trajectory: _RunningTrajectory) -> None:
        """Its next segment begins after what was made."""
        if trajectory.tokens:
            assert self._version is not None
            tokens, logprobs = tuple(trajectory.tokens), tuple(trajectory.logprobs)
            self._segments.append(Segment(trajectory.trajectory, trajectory.offset, tokens, logprobs, self._version))
            trajectory.offset += len(tokens)
            trajectory.tokens, trajectory.logprobs = [], []

    def abort(self, trajectories: Iterable[int]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        gone = set(trajectories)
        self._llm.abort_request([str(each) for each in gone if self._running.pop(each, None) is not None])
        self._segments = [segment for segment in self._segments if segment.trajectory not in gone]
        self._finished = [trajectory for trajectory in self._finished if trajectory not in gone]

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`. Running requests wait for their next turn as vLLM's preempted
        ones do, and what they are is read again. Any error but ValueError leaves a model that is half new: the process
        must end."""
        try:
            given = list(fitting(self._model, tensors).items())
        except ValueError as error:
            raise ValueError(f"{version}: {error}") from None
        for one in self._running.values():
            self._close_segment(one)
        self._llm.collective_rpc("start_weight_update")
        if self._is_single_process:  # they are views, and stay views
            self._llm.collective_rpc("update_weights", kwargs={"update_info": {"tensors": given}})
        else:
            for bucket in buckets(given, BUCKET_BYTES):
                with shared_bucket(bucket) as update_info:
                    self._llm.collective_rpc("update_weights", kwargs={"update_info": update_info})
        self._llm.collective_rpc("finish_weight_update")
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM keeps what it computed under the old weights")
        self._version = version

    def probe(self) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`. Where trajectories run, their next token is the probe."""
        if not self._running:
            self._submit(_PROBE, [0], 1)
        before = self._tokens
        while self._tokens == before:
            self._advance()

    def close(self) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        self._llm.engine_core.shutdown()
        self._version = None


class _RunningTrajectory:
    """One trajectory in the making: ``tokens`` and ``logprobs`` of the segment from ``offset`` on."""

    def __init__(self, trajectory: int, offset: int) -> None:
        self.trajectory, self.offset = trajectory, offset
        self.tokens: list[int] = []
        self.logprobs: list[float] = []


def _trajectory(request: str) -> int:
    """-1: the probe."""
    return -1 if request == _PROBE else int(request)
