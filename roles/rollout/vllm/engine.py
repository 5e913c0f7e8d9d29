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
from ..engine import Grown, Sampling
from .weight_transfer import BUCKET, buckets, shared

HAND_OVER = 0.1
"""s between two times that complete trajectories alone are handed over: each is a round trip to the store, while the
model stands still. Those that wait for it leave their places empty for so long."""
_PROBE = "probe"
_ENDS = ("stop", "length")
"""the reasons to finish that are a trajectory's own end"""


class VllmEngine:
    """``config``: of :func:`rrl.roles.rollout.vllm.config.configure`; ``model``: as transformers builds it, for names
    and shapes (the meta device will do); ``ends``: tokens that end a trajectory; ``lease``: the most that it takes at
    once."""

    def __init__(self, config: Any, model: nn.Module, *, ends: frozenset[int], sampling: Sampling, lease: int) -> None:
        if sampling.greedy and sampling.temperature != 1.0:
            raise ValueError("vLLM records greedy log-probabilities at temperature 1 only")
        self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._model = model
        self._alone = config.parallel_config.world_size == 1
        self._places: int = config.scheduler_config.max_num_seqs
        self._longest: int = config.model_config.max_model_len
        self._lease, self._ends, self._sampling = lease, sorted(ends), sampling
        self._version: Version | None = None
        self._growing: dict[int, _Growing] = {}
        self._made: list[Segment] = []
        """whole segments, not handed over yet"""
        self._finished: list[int] = []
        """complete trajectories, not reported yet"""
        self._handed_over = time.monotonic()
        self._tokens = 0
        """that came out of vLLM, in all"""

    @property
    def room(self) -> int:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        return max(0, min(self._lease, self._places - len(self._growing)))

    @property
    def busy(self) -> bool:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        return bool(self._growing or self._made or self._finished)

    def add(self, items: Sequence[Item]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`. A trajectory also ends where the model's length does."""
        for item in items:
            grown = [token for segment in item.so_far for token in segment.tokens]
            tokens = [*item.prompt, *grown]
            left = min(item.max_new, self._longest - len(tokens))
            if left <= 0 or (grown and grown[-1] in self._ends):
                self._finished.append(item.trajectory)
                continue
            self._growing[item.trajectory] = _Growing(item.trajectory, len(grown))
            self._submit(str(item.trajectory), tokens, left)

    def _submit(self, name: str, tokens: list[int], most: int) -> None:
        how = SamplingParams(
            temperature=0.0 if self._sampling.greedy else self._sampling.temperature,
            max_tokens=most,
            stop_token_ids=self._ends,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._llm.add_request(name, tokens_input(tokens), how)

    def step(self) -> Grown:
        """See :class:`rrl.roles.rollout.engine.Engine`. Whatever is due is handed over: segments once they are
        ``segment_tokens`` long; those that complete a trajectory with them, or after :data:`HAND_OVER` s, or when
        nothing runs any more."""
        if self._version is None:
            raise RuntimeError("no weights were loaded yet")
        if self._growing:
            self._advance()
        late = time.monotonic() >= self._handed_over + HAND_OVER
        due = any(len(one.tokens) >= self._sampling.segment_tokens for one in self._growing.values())
        if not (due or not self._growing or (late and self._finished)):
            return [], []
        for one in self._growing.values():
            if len(one.tokens) >= self._sampling.segment_tokens:
                self._close(one)
        return self._hand_over()

    def rest(self) -> Grown:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        for one in self._growing.values():
            self._close(one)
        return self._hand_over()

    def _hand_over(self) -> Grown:
        made, finished, self._made, self._finished = self._made, self._finished, [], []
        self._handed_over = time.monotonic()
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
                if (one := self._growing.get(_trajectory(output.request_id))) is not None:
                    one.tokens.append(token)
                    one.logprobs.append(logprob)
            if output.finished:
                self._end(_trajectory(output.request_id), only.finish_reason)

    def _end(self, trajectory: int, reason: str | None) -> None:
        if reason not in _ENDS:
            raise RuntimeError(f"vLLM gave up trajectory {trajectory}: {reason}")
        if (one := self._growing.pop(trajectory, None)) is not None:
            self._close(one)
            self._finished.append(trajectory)

    def _close(self, one: _Growing) -> None:
        """Its next segment begins after what was made."""
        if one.tokens:
            assert self._version is not None
            tokens, logprobs = tuple(one.tokens), tuple(one.logprobs)
            self._made.append(Segment(one.trajectory, one.offset, tokens, logprobs, self._version))
            one.offset += len(tokens)
            one.tokens, one.logprobs = [], []

    def drop(self, trajectories: Iterable[int]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        gone = set(trajectories)
        self._llm.abort_request([str(each) for each in gone if self._growing.pop(each, None) is not None])
        self._made = [segment for segment in self._made if segment.trajectory not in gone]
        self._finished = [trajectory for trajectory in self._finished if trajectory not in gone]

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`. Running requests wait for their next turn as vLLM's preempted
        ones do, and what they are is read again. Any error but ValueError leaves a model that is half new: the process
        must end."""
        try:
            given = list(fitting(self._model, tensors).items())
        except ValueError as error:
            raise ValueError(f"{version}: {error}") from None
        for one in self._growing.values():
            self._close(one)
        self._llm.collective_rpc("start_weight_update")
        if self._alone:  # they are views, and stay views
            self._llm.collective_rpc("update_weights", kwargs={"update_info": {"tensors": given}})
        else:
            for bucket in buckets(given, BUCKET):
                with shared(bucket) as told:
                    self._llm.collective_rpc("update_weights", kwargs={"update_info": told})
        self._llm.collective_rpc("finish_weight_update")
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM keeps what it computed under the old weights")
        self._version = version

    def probe(self) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`. Where trajectories run, their next token is the probe."""
        if not self._growing:
            self._submit(_PROBE, [0], 1)
        before = self._tokens
        while self._tokens == before:
            self._advance()

    def close(self) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        self._llm.engine_core.shutdown()
        self._version = None


class _Growing:
    """One trajectory in the making: ``tokens`` and ``logprobs`` of the segment from ``offset`` on."""

    def __init__(self, trajectory: int, offset: int) -> None:
        self.trajectory, self.offset = trajectory, offset
        self.tokens: list[int] = []
        self.logprobs: list[float] = []


def _trajectory(request: str) -> int:
    """-1: the probe."""
    return -1 if request == _PROBE else int(request)
