"""vLLM as a rollout's engine, in this process: a step of the engine is one step of vLLM's scheduler.

New weights are loaded between two steps. With tensor parallelism vLLM starts worker processes. They are in this
process's group, so that the launcher ends them together with this process.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import asdict
from torch import Tensor, nn
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

from ....config.vllm_arguments import ROUTED_EXPERTS
from ....core.types import Version
from ...launcher.end_report import Diverged
from ...models.policy import fitting
from ...trajectories.types import Item, PathDigest, Segment
from ..engine import IN_USE_TEXT, Sampling, StepOutput
from ..foreign_sampling import seed_at
from .weight_transfer import BUCKET_BYTES, buckets, shared_bucket

_log = logging.getLogger("rrl.rollout")

HAND_OVER_INTERVAL_S = 0.1
"""Minimum seconds between two results of :meth:`VllmEngine.step` that only report complete trajectories. Each result
costs a round trip to the store, during which the model is idle. A longer interval would leave the slots of complete
trajectories empty for longer."""
WAKE_TOLERANCE = 0.05
"""Largest difference (nats) between the log-probabilities of a token before a sleep and after it. Kernels may differ in
the last bits; wrong weights change it by whole nats."""
_GRAMMAR_POLL_S = 0.002
"""Seconds between two looks whether vLLM's threads have compiled a grammar."""
_PROBE = "probe"
_COMPLETION_REASONS = ("stop", "length")
"""Finish reasons of vLLM for a complete trajectory. Any other reason means that vLLM has aborted the trajectory."""


class VllmEngine:
    """Engine on vLLM.

    Args:
        config: The configuration of :func:`.config.configure`.
        model: The model as transformers builds it, for names and shapes; may be on the meta device. None for a
            kind of model that rrl cannot build: then only vLLM compares the weights with its model.
        stop_tokens: Tokens that end a trajectory.
        sampling: How to sample.
        lease: Maximum number of trajectories that are accepted at the same time.
    """

    def __init__(
        self, config: Any, model: nn.Module | None, *, stop_tokens: frozenset[int], sampling: Sampling, lease: int
    ) -> None:
        if sampling.greedy and sampling.temperature != 1.0:
            raise ValueError(
                "greedy sampling requires temperature 1, at which vLLM records the log-probabilities of greedy tokens"
            )
        self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._model = model
        self._returns_routing: bool = config.aux_output_config.enabled
        self._is_single_process = config.parallel_config.world_size == 1
        self._max_sequences: int = config.scheduler_config.max_num_seqs
        self._max_length: int = config.model_config.max_model_len
        self._lease, self._stop_tokens, self._sampling = lease, sorted(stop_tokens), sampling
        self._version: Version | None = None
        self._running: dict[int, _RunningTrajectory] = {}
        self._segments: list[Segment] = []
        """Complete segments that were not returned yet."""
        self._finished: list[int] = []
        """Complete trajectories that were not reported yet."""
        self._handed_over_at = time.monotonic()
        self._tokens = 0
        """Number of tokens that vLLM has generated so far."""
        self._sleeps: bool = config.model_config.enable_sleep_mode
        self._cache_asleep = False
        self._before_sleep: tuple[Version | None, float] | None = None
        """The version before the first sleep, and the log-probability of a token under it."""
        self._probed = 0.0
        """Log-probability of the newest token of a probe."""

    @property
    def free_slots(self) -> int:
        """Number of further trajectories that the engine would accept now."""
        return max(0, min(self._lease, self._max_sequences - len(self._running)))

    @property
    def has_work(self) -> bool:
        """True if :meth:`step` has anything to generate or to return."""
        return bool(self._running or self._segments or self._finished)

    def add(self, items: Sequence[Item]) -> None:
        """Begin to extend these trajectories too. A trajectory also ends at the model's maximum length."""
        for item in items:
            generated = [token for segment in item.so_far for token in segment.tokens]
            tokens = [*item.prompt, *generated]
            remaining = min(item.max_new, self._max_length - len(tokens))
            if remaining <= 0 or (generated and generated[-1] in self._stop_tokens):
                self._finished.append(item.trajectory)
                continue
            running, overrides = _RunningTrajectory(item.trajectory, len(generated)), _overrides(item, len(generated))
            running.masked = "structured_outputs" in overrides
            try:
                self._submit(str(item.trajectory), tokens, remaining, overrides)
            except Exception as error:  # vLLM has kinds of its own
                if not running.masked:
                    raise
                _log.warning("a turn ends at once, because its constraint cannot be compiled: %.300s", error)
                self._finished.append(item.trajectory)
                continue
            self._running[item.trajectory] = running
            if running.masked and generated:
                self._advance_mask(str(item.trajectory), generated)

    def _submit(self, name: str, tokens: list[int], max_new: int, overrides: dict[str, Any] | None = None) -> None:
        job = {"temperature": 0.0 if self._sampling.greedy else self._sampling.temperature}
        params = SamplingParams(
            **(job | (overrides or {})),
            max_tokens=max_new,
            stop_token_ids=self._stop_tokens,
            logprobs=0,  # only of the sampled token
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            routed_experts_prompt_start=len(tokens) - 1,  # that of the position from which a token is sampled
        )
        self._llm.add_request(name, tokens_input(tokens), params)

    def _advance_mask(self, name: str, generated: list[int]) -> None:
        """Tell the grammar of a request which tokens came before: vLLM has them in the prompt, and begins after it."""
        (internal,) = self._llm.output_processor.external_req_ids[name]
        request = self._llm.engine_core.engine_core.scheduler.requests[internal].structured_output_request
        while not request.is_grammar_ready:
            time.sleep(_GRAMMAR_POLL_S)
        if not isinstance(request.grammar, Exception):
            request.grammar.accept_tokens(internal, generated)

    def step(self) -> StepOutput:
        """Run one step of vLLM's scheduler, and return what is due (:meth:`..engine.Engine.step`).

        A segment is returned once it has ``segment_tokens`` tokens. The last segment of a complete trajectory may be
        shorter. It is returned at the first of three moments: together with a segment of full length, when
        :data:`HAND_OVER_INTERVAL_S` has passed since the last result, or when no trajectory runs.
        """
        if self._version is None:
            raise RuntimeError("no weights have been loaded yet")
        if self._running:
            self._advance()
        late = time.monotonic() >= self._handed_over_at + HAND_OVER_INTERVAL_S
        due = any(len(running.tokens) >= self._sampling.segment_tokens for running in self._running.values())
        if not (due or not self._running or (late and self._finished)):
            return [], []
        for running in self._running.values():
            if len(running.tokens) >= self._sampling.segment_tokens:
                self._close_segment(running)
        return self._hand_over()

    def flush(self) -> StepOutput:
        """Return all tokens that were generated and not returned yet."""
        for running in self._running.values():
            self._close_segment(running)
        return self._hand_over()

    def _hand_over(self) -> StepOutput:
        segments, finished, self._segments, self._finished = self._segments, self._finished, [], []
        self._handed_over_at = time.monotonic()
        return segments, finished

    def _advance(self) -> None:
        """Run one step of vLLM's scheduler."""
        for output in self._llm.step():
            (completion,) = output.outputs
            running = self._running.get(_trajectory(output.request_id))
            if running is not None and self._returns_routing:
                running.routing += self._routing(running, output.request_id, completion)
            for token, logprobs in zip(completion.token_ids, completion.logprobs or (), strict=True):
                logprob = logprobs[token].logprob
                if not math.isfinite(logprob):
                    raise Diverged(self._version, f"the log-probability {logprob}")
                self._tokens += 1
                if running is None:
                    self._probed = logprob
                else:
                    running.add(token, logprob, output.prompt_token_ids)
            if output.finished:
                self._on_finished(_trajectory(output.request_id), completion.finish_reason)

    def _routing(self, running: _RunningTrajectory, request: str, completion: CompletionOutput) -> bytes:
        """Return the experts that the routers chose where the tokens of this step were sampled, by layer.

        vLLM has a row for each token. It joins the rows of a request in the last output; until then they are only in
        the request's state.
        """
        rows = completion.routed_experts
        if rows is None:
            processor = self._llm.output_processor
            (internal,) = processor.external_req_ids[request]
            rows = np.concatenate(processor.request_states[internal].routed_experts_chunks[running.steps :])
            running.steps, running.rows = running.steps + 1, running.rows + len(completion.token_ids)
        else:
            rows = rows[running.rows :]
        if len(rows) != len(completion.token_ids):
            raise RuntimeError(
                f"vLLM returned the routing of {len(rows)} tokens for {len(completion.token_ids)} tokens of trajectory"
                f" {running.trajectory}; this rollout ends and is restarted"
            )
        return bytes(rows.tobytes())

    def _on_finished(self, trajectory: int, reason: str | None) -> None:
        running = self._running.pop(trajectory, None)
        if reason not in _COMPLETION_REASONS and not (running and running.masked):  # a grammar may fail at any token
            raise RuntimeError(f"vLLM aborted trajectory {trajectory}: {reason}; this rollout ends and is restarted")
        if running is not None:
            self._close_segment(running)
            self._finished.append(trajectory)

    def _close_segment(self, trajectory: _RunningTrajectory) -> None:
        """End the current segment of a trajectory; the next segment begins after it."""
        if trajectory.tokens:
            assert self._version is not None
            tokens, logprobs = tuple(trajectory.tokens), tuple(trajectory.logprobs)
            trajectory.path.add(tokens)
            digest = trajectory.path.value()
            extras = {ROUTED_EXPERTS: bytes(trajectory.routing)} if self._returns_routing else {}
            self._segments.append(
                Segment(trajectory.trajectory, trajectory.offset, tokens, logprobs, self._version, digest, extras)
            )
            trajectory.offset += len(tokens)
            trajectory.tokens, trajectory.logprobs, trajectory.routing = [], [], bytearray()

    def abort(self, trajectories: Iterable[int]) -> None:
        """Stop extending these trajectories (:meth:`..engine.Engine.abort`)."""
        aborted = set(trajectories)
        self._llm.abort_request([str(number) for number in aborted if self._running.pop(number, None) is not None])
        self._segments = [segment for segment in self._segments if segment.trajectory not in aborted]
        self._finished = [trajectory for trajectory in self._finished if trajectory not in aborted]

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load a complete set of weights (:meth:`..engine.Engine.load`).

        Running requests are scheduled again like preempted requests, and their prefixes are read again. After an error
        that is not a ValueError, some of the weights may be new and others old, so the process must end.
        """
        try:
            given = list(tensors) if self._model is None else list(fitting(self._model, tensors).items())
        except ValueError as error:
            raise ValueError(f"{version}: {error}") from None
        for running in self._running.values():
            self._close_segment(running)
        self._llm.collective_rpc("start_weight_update")
        if self._is_single_process:  # passed as views, without a copy
            self._llm.collective_rpc("update_weights", kwargs={"update_info": {"tensors": given}})
        else:
            for bucket in buckets(given, BUCKET_BYTES):
                with shared_bucket(bucket) as update_info:
                    self._llm.collective_rpc("update_weights", kwargs={"update_info": update_info})
        self._llm.collective_rpc("finish_weight_update")
        if self._cache_asleep:
            self._llm.wake_up(["kv_cache"])
            self._cache_asleep = False
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(
                "vLLM did not discard the key-value cache of the old weights; this rollout ends and is restarted"
            )
        self._version = version
        if self._before_sleep is not None and self._before_sleep[0] == version:
            before, after = self._before_sleep[1], self._probe_greedily()
            if not abs(after - before) <= WAKE_TOLERANCE:
                raise RuntimeError(
                    f"vLLM woke with other weights: under {version} the log-probability of a token is {after:.4f}, but"
                    f" was {before:.4f} before the first sleep; this guest ends and is restarted"
                )

    def sleep(self) -> None:
        """Discard weights and cache (level 2). On a CPU vLLM cannot: they stay in memory, as a warning said."""
        self.abort(list(self._running))
        self._segments, self._finished = [], []
        if self._sleeps:
            first = self._before_sleep is None
            if first:
                self._before_sleep = (self._version, self._probe_greedily())
            self._llm.sleep(level=2)
            if first:
                _log.info(IN_USE_TEXT, max(self._llm.collective_rpc("memory_in_use")) / 2**30)
        self._version = None

    def wake(self) -> None:
        """Get the memory of the weights back; the cache follows in :meth:`load`, which needs memory of its own."""
        if self._sleeps:
            self._llm.wake_up(["weights"])
            self._cache_asleep = True

    def _probe_greedily(self) -> float:
        """Return the log-probability of the most likely token after the first one of the vocabulary."""
        self._submit(_PROBE, [0], 1, {"temperature": 0.0})
        self._advance_by_a_token()
        return self._probed

    def probe(self) -> None:
        """Run vLLM until it has generated a token. If no trajectory runs, submit a request for one token first."""
        if not self._running:
            self._submit(_PROBE, [0], 1)
        self._advance_by_a_token()

    def _advance_by_a_token(self) -> None:
        before = self._tokens
        while self._tokens == before:
            self._advance()

    def close(self) -> None:
        """Free the engine's resources."""
        self._llm.engine_core.shutdown()
        self._version = None


class _RunningTrajectory:
    """A running trajectory: ``tokens`` and ``logprobs`` of the current segment, which begins at ``offset``."""

    def __init__(self, trajectory: int, offset: int) -> None:
        self.trajectory, self.offset = trajectory, offset
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.masked = False
        """True if a constraint masks its tokens."""
        self.routing = bytearray()
        """The extra of ``tokens``, if vLLM returns it."""
        self.steps = self.rows = 0
        """Number of steps, and of tokens, whose routing was read."""
        self.path = PathDigest()
        self._has_prompt = False

    def add(self, token: int, logprob: float, prompt: Sequence[int]) -> None:
        """Add a sampled token. ``prompt`` contains the tokens before the first token that vLLM sampled."""
        if not self._has_prompt:
            self._has_prompt = True
            self.path.add(prompt)
        self.tokens.append(token)
        self.logprobs.append(logprob)


def _overrides(item: Item, position: int) -> dict[str, Any]:
    """Return vLLM's parameters in which a trajectory differs from the job; sampling begins at ``position``."""
    given = {} if item.sampling is None else {k: v for k, v in asdict(item.sampling).items() if v is not None}
    if "seed" in given:
        given["seed"] = seed_at(given["seed"], position)
    if grammar := given.pop("constraint", None):
        given["structured_outputs"] = StructuredOutputsParams(grammar=grammar)
    return given


def _trajectory(request: str) -> int:
    """Return the trajectory of a request; -1 for the probe."""
    return -1 if request == _PROBE else int(request)
