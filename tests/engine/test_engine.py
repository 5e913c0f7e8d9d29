"""A real vLLM engine on CPU with a tiny model, compared with torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.utils import replace_parameter

from rrl.core.types import Version
from rrl.roles.models.policy import weights
from rrl.roles.rollout.engine import Engine, Sampling
from rrl.roles.trajectories.types import Item, PathDigest, Segment
from rrl.roles.trajectories.types import Sampling as Overrides
from rrl.tests.support.engine import engines
from rrl.tests.support.engine.engines import ATOL, EOS, SPEC, Made

pytestmark = pytest.mark.vllm

TEMPERATURE = 0.7
SEGMENT = 8
LEASE = 16
_A, _B = engines.random_weights(SPEC, 1), engines.random_weights(SPEC, 2)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = engines.vllm_engine(
        SPEC, tmp_path_factory.mktemp("model"), Sampling(temperature=TEMPERATURE, segment_tokens=SEGMENT), LEASE
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Return an idle engine with the weights of step 0."""
    engines.load(shared, 0, _A)
    yield shared
    shared.abort(range(1000))
    assert not shared.has_work


def test_logprobs_match_the_sampled_distribution_across_an_update(engine: Engine) -> None:
    for step, model in enumerate((_A, _B, _A)):
        engines.load(engine, step, model)
        engine.probe()
        given, made = engines.items(LEASE), Made()
        engine.add(given)
        made.to_the_end(engine)
        assert sorted(made.finished) == [item.trajectory for item in given]
        assert made.worst(given, {step: model}, TEMPERATURE)[step] < ATOL
        assert made.worst(given, {step: model}, 1.0)[step] > 0.1, "the temperature has no effect on the probabilities"


def test_segments_have_the_routing_of_their_own_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM records the routing only on GPUs (its model runner needs Triton), so the test adds it to the core's output.

    The rows are those of the runner: one for each new token.
    """
    core = engine._llm.engine_core  # type: ignore[attr-defined]
    rows: dict[str, list[bytes]] = {}
    get_output = core.get_output

    def routed() -> Any:
        outputs = get_output()
        for one in outputs.outputs:
            made = rows.setdefault(one.request_id.partition("-")[0], [])
            new = [[[len(made) + place, 7], [9, len(one.request_id)]] for place in range(len(one.new_token_ids))]
            one.routed_experts = np.array(new, np.uint8)
            made += [np.array(row, np.uint8).tobytes() for row in new]
        return outputs

    monkeypatch.setattr(core, "get_output", routed)
    monkeypatch.setattr(engine, "_returns_routing", True)
    given, made = engines.items(3, max_new=20), Made()
    engine.add(given)
    made.steps(engine, 11)
    engines.load(engine, 1, _B)
    made.steps(engine, 2)
    engine.abort([2])
    made.to_the_end(engine)
    assert sorted(made.finished) == [0, 1]
    for trajectory in (0, 1):
        segments = made.segments[trajectory]
        assert len(segments) > 1
        assert b"".join(one.extras["routed_experts"] for one in segments) == b"".join(rows[str(trajectory)])
        assert all(len(one.extras["routed_experts"]) == 4 * len(one.tokens) for one in segments)


def test_running_trajectories_continue_with_new_weights_per_segment(engine: Engine) -> None:
    given, made = engines.items(LEASE, max_new=200), Made()
    engine.add(given)
    usual, pauses = [], []
    for step, model in ((1, _B), (2, _A), (3, _B)):
        # not a multiple of the segment length, so that the engine still holds tokens of the old version
        for _ in range(11):
            began = time.perf_counter()
            made.take(*engine.step())
            usual.append(time.perf_counter() - began)
        ended = time.perf_counter()
        engines.load(engine, step, model)
        made.take(*engine.step())
        pauses.append(time.perf_counter() - ended)
    pause = statistics.median(pauses) - statistics.median(usual)
    print(f"pause for new weights: {1e3 * pause:.1f} ms; a step: {1e3 * statistics.median(usual):.1f} ms")
    made.to_the_end(engine)
    assert sorted(made.finished) == [item.trajectory for item in given]
    worst = made.worst(given, {0: _A, 1: _B, 2: _A, 3: _B}, TEMPERATURE)
    assert worst.keys() == {0, 1, 2, 3}
    assert max(worst.values()) < ATOL, worst
    wrong = made.worst(given, {0: _B, 1: _A, 2: _B, 3: _A}, TEMPERATURE)
    assert min(wrong.values()) > 0.1, "the log-probabilities of the two models do not differ"


def test_segments_have_the_requested_length_and_a_trajectory_ends_once(engine: Engine) -> None:
    given, made = engines.items(LEASE, max_new=30), Made()
    engine.add(given)
    made.to_the_end(engine)
    assert sorted(made.finished) == [item.trajectory for item in given]
    for item in given:
        tokens = made.tokens(item.trajectory)
        assert EOS not in tokens[:-1]
        assert tokens[-1] == EOS or len(tokens) == item.max_new
        lengths = [len(segment.tokens) for segment in made.segments[item.trajectory]]
        assert all(length == SEGMENT for length in lengths[:-1]), lengths
        assert lengths[-1] <= SEGMENT


def test_trajectory_of_another_incarnation_is_continued(engine: Engine) -> None:
    so_far = (Segment(7, 0, (5, 6, 7), (-1.0, -1.0, -1.0), Version(0, 1)),)
    item, made = Item(7, 1, (2, 3, 4), so_far, max_new=12), Made()
    made.segments[7] = list(so_far)
    engine.add([item])
    made.to_the_end(engine)
    made.segments[7] = made.segments[7][1:]
    assert made.finished == [7]
    assert made.worst([item], {0: _A}, TEMPERATURE)[0] < ATOL


def _digest(*tokens: int) -> bytes:
    path = PathDigest()
    path.add(tokens)
    return path.value()


def test_segments_carry_the_digest_of_the_tokens_of_vllm_across_an_update(engine: Engine) -> None:
    so_far = (Segment(30, 0, (5, 6, 7), (-1.0, -1.0, -1.0), Version(0, 1)),)
    given, made = [*engines.items(4, max_new=30), Item(30, 9, (2, 3, 4), so_far, max_new=12)], Made()
    made.segments[30] = list(so_far)
    engine.add(given)
    made.steps(engine, 5)
    engines.load(engine, 1, _B)
    made.to_the_end(engine)
    for item in given:
        had = list(item.prompt)
        for segment in made.segments[item.trajectory]:
            had += segment.tokens
            assert segment in so_far or segment.digest == _digest(*had)
    assert any(segment.version.step == 1 for segment in made.segments[0])


def test_foreign_turns_use_their_own_sampling_beside_turns_of_the_job(engine: Engine) -> None:
    prompt = tuple(range(2, 12))
    penalties = Overrides(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2, top_p=0.9, min_p=0.01)
    seeded = Overrides(seed=7)
    how = [None, Overrides(temperature=0.0), Overrides(top_k=1, seed=5), seeded, seeded, penalties]
    made = Made()
    engine.add([Item(n, 0, prompt, (), 20, each) for n, each in enumerate(how)])
    made.to_the_end(engine)
    assert sorted(made.finished) == list(range(len(how)))
    assert made.tokens(1) == made.tokens(2), "temperature 0 and top_k 1 differ, though both take the most likely token"
    assert made.tokens(3) == made.tokens(4) != made.tokens(0)
    given = [Item(0, 0, prompt, (), 20)]
    assert made.worst(given, {0: _A}, TEMPERATURE)[0] < ATOL, (
        "the item without overrides is not sampled as the job requests"
    )


def test_trajectory_that_is_ended_or_full_is_finished_without_a_segment(engine: Engine) -> None:
    ended = Item(1, 0, (2, 3), (Segment(1, 0, (4, EOS), (-1.0, -1.0), Version(0, 1)),), max_new=5)
    full = Item(2, 0, (2, 3), (), max_new=0)
    too_long = Item(3, 0, (2,) * 256, (), max_new=5)
    engine.add([ended, full, too_long])
    assert engine.has_work
    assert engine.step() == ([], [1, 2, 3])
    assert not engine.has_work


def test_trajectory_ends_at_the_maximum_length_of_the_model(engine: Engine) -> None:
    item, made = Item(1, 0, tuple(range(2, 102)) + (2,) * 150, (), max_new=200), Made()
    engine.add([item])
    made.to_the_end(engine)
    assert made.finished == [1]
    assert len(made.tokens(1)) <= 6


def test_free_slots_grow_as_trajectories_end(engine: Engine) -> None:
    assert engine.free_slots == LEASE
    given, made = engines.items(LEASE, max_new=200), Made()
    engine.add(given[:3])
    assert engine.free_slots == LEASE - 3
    made.steps(engine, 3)
    engine.add(given[3:])
    assert engine.free_slots == 0
    while not made.finished:
        made.steps(engine, 1)
    assert engine.free_slots > 0
    assert engine.has_work
    late = engines.items(engine.free_slots, first=100)
    engine.add(late)
    made.to_the_end(engine)
    assert sorted(made.finished) == [item.trajectory for item in (*given, *late)]
    assert made.worst([*given, *late], {0: _A}, TEMPERATURE)[0] < ATOL


def test_dropped_trajectory_stops_without_effect_on_the_others(engine: Engine) -> None:
    given, made = engines.items(4, max_new=200), Made()
    engine.add(given)
    made.steps(engine, 5)
    engine.abort([1, 2, 77])
    assert engine.free_slots == LEASE - 2
    made.to_the_end(engine)
    assert sorted(made.finished) == [0, 3]
    assert made.segments.keys() == {0, 3}
    engine.add([given[1]])  # it may be given again
    made.to_the_end(engine)
    assert 1 in made.finished


def test_stopped_engine_returns_the_tokens_generated_so_far(engine: Engine) -> None:
    given, made = engines.items(4, max_new=200), Made()
    engine.add(given)
    made.steps(engine, 5)
    assert not made.segments
    made.take(*engine.flush())
    assert {len(made.tokens(n)) for n in range(4)} == {5}
    assert made.worst(given, {0: _A}, TEMPERATURE)[0] < ATOL


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(engine: Engine) -> None:
    good = weights(_B)
    wrong_shape = good | {"lm_head.weight": torch.zeros(2, 2)}
    missing = {name: tensor for name, tensor in good.items() if name != "model.norm.weight"}
    for wrong, why in (
        (wrong_shape, r"v1\.1: lm_head.weight has the shape \(2, 2\)"),
        (missing, "v1.1: .*model.norm.weight"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.load(Version(1, 1), wrong.items())
    given, made = engines.items(4), Made()
    engine.add(given)
    made.to_the_end(engine)
    assert made.worst(given, {0: _A}, TEMPERATURE).keys() == {0}
    assert made.worst(given, {0: _A}, TEMPERATURE)[0] < ATOL


def test_loaded_weights_do_not_share_memory_with_their_source(engine: Engine) -> None:
    borrowed = {name: tensor.clone() for name, tensor in weights(_B).items()}
    engine.load(Version(1, 1), borrowed.items())
    for tensor in borrowed.values():
        tensor.zero_()
    given, made = engines.items(4), Made()
    engine.add(given)
    made.to_the_end(engine)
    assert made.worst(given, {1: _B}, TEMPERATURE)[1] < ATOL


def test_probe_fails_with_weights_that_give_nan_logits_also_while_trajectories_run(engine: Engine) -> None:
    broken = weights(_B) | {"lm_head.weight": torch.full_like(weights(_B)["lm_head.weight"], torch.nan)}
    engine.load(Version(1, 1), broken.items())
    with pytest.raises(RuntimeError, match=r"weights v1\.1 returned the log-probability nan"):
        engine.probe()
    engines.load(engine, 2, _A)
    engine.add(engines.items(4))
    engine.probe()
    engine.load(Version(3, 1), broken.items())
    with pytest.raises(RuntimeError, match=r"weights v3\.1 returned the log-probability nan"):
        engine.probe()


class _SleepingLlm:
    """vLLM of a GPU as far as sleep is concerned: it keeps the order of the calls, and may lose the weights."""

    def __init__(self, llm: Any, log: list[Any]) -> None:
        self._llm, self._log = llm, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def sleep(self, level: int) -> None:
        assert not self._llm.has_unfinished_requests()
        self._log.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self._log.append(("wake_up", *tags))

    def collective_rpc(self, method: str, *args: Any, **named: Any) -> Any:
        self._log.append(method)
        return [2**30] if method == "memory_in_use" else self._llm.collective_rpc(method, *args, **named)

    def reset_prefix_cache(self, **named: Any) -> Any:
        self._log.append("reset_prefix_cache")
        return self._llm.reset_prefix_cache(**named)


@pytest.fixture
def calls(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the engine believe that it can sleep; return the calls of vLLM that it makes from then on."""
    calls: list[Any] = []
    monkeypatch.setattr(engine, "_llm", _SleepingLlm(engine._llm, calls))  # type: ignore[attr-defined]
    monkeypatch.setattr(engine, "_sleeps", True)
    monkeypatch.setattr(engine, "_before_sleep", None)
    return calls


def test_sleep_discards_everything_and_the_cache_comes_back_after_the_weights(engine: Engine, calls: list[Any]) -> None:
    for first in (True, False):
        engine.add(engines.items(4))
        engine.step()
        calls.clear()
        engine.sleep()
        assert not engine.has_work
        assert calls == [("sleep", 2), *(["memory_in_use"] if first else [])]
        calls.clear()
        engine.wake()
        engines.load(engine, 0, _A)
        loading = ["start_weight_update", "update_weights", "finish_weight_update"]
        assert calls == [("wake_up", "weights"), *loading, ("wake_up", "kv_cache"), "reset_prefix_cache"]
    given, made = engines.items(4), Made()
    engine.add(given)
    made.to_the_end(engine)
    assert made.worst(given, {0: _A}, TEMPERATURE)[0] < ATOL


def test_wake_with_other_weights_ends_the_engine(engine: Engine, calls: list[Any]) -> None:
    engine.sleep()
    engine.wake()
    engines.load(engine, 1, _B)  # another version: there is nothing to compare with
    engine.sleep()
    engine.wake()
    with pytest.raises(RuntimeError, match=r"vLLM woke with other weights: under v0\.1 the log-probability"):
        engines.load(engine, 0, _B)


def test_engine_on_a_cpu_stays_in_memory_and_works_on(engine: Engine) -> None:
    engine.sleep()
    engine.wake()
    engines.load(engine, 0, _A)
    given, made = engines.items(4), Made()
    engine.add(given)
    made.to_the_end(engine)
    assert made.worst(given, {0: _A}, TEMPERATURE)[0] < ATOL


def test_tied_embeddings_are_updated_in_the_output_too(tmp_path: Path) -> None:
    spec = engines.tied_folder(tmp_path / "model")
    first, second = engines.random_weights(spec, 1), engines.random_weights(spec, 2)
    engine = engines.vllm_engine(spec, tmp_path, Sampling(segment_tokens=SEGMENT))
    given, made = engines.items(4, max_new=60), Made()
    engines.load(engine, 0, first)
    engine.add(given)
    made.steps(engine, 11)
    engines.load(engine, 1, second)
    made.to_the_end(engine)
    worst = made.worst(given, {0: first, 1: second}, 1.0)
    assert worst.keys() == {0, 1}
    assert max(worst.values()) < ATOL, worst
    engine.close()


def test_nothing_is_sampled_before_weights_are_loaded(tmp_path: Path) -> None:
    engine = engines.vllm_engine(SPEC, tmp_path, Sampling())
    engine.add(engines.items(1))
    with pytest.raises(RuntimeError, match="no weights"):
        engine.step()
    engine.close()


def test_parameters_that_vllm_derives_from_weights_are_not_required_of_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM accepts a next version without the parameters that it computes itself, such as the scales of fp8.

    The test adds such a parameter to a layer, because vLLM has no fp8 on a CPU.
    """
    load = UnquantizedLinearMethod.process_weights_after_loading

    def load_and_scale(self: UnquantizedLinearMethod, layer: torch.nn.Module) -> None:
        load(self, layer)
        replace_parameter(layer, "weight_scale", torch.ones(1))

    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", load_and_scale)
    engine = engines.vllm_engine(SPEC, tmp_path, Sampling(temperature=TEMPERATURE, segment_tokens=SEGMENT))
    for step, model in enumerate((_A, _B)):
        engines.load(engine, step, model)
        given, made = engines.items(4), Made()
        engine.add(given)
        made.to_the_end(engine)
        assert made.worst(given, {step: model}, TEMPERATURE)[step] < ATOL
    engine.close()
