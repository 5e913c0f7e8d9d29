"""The publishing thread: what it publishes, when the training thread waits for it, and how much memory both need."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrl.core.types import Version
from rrl.roles.trainer.host_buffers import Layout
from rrl.roles.trainer.process_group import Gang
from rrl.roles.trainer.publisher import Publisher
from rrl.roles.trajectories.batches import Batch
from rrl.roles.trajectories.types import Trajectory
from rrl.roles.worker.connection import Stopping
from rrl.tests.support.listening_manager import TIMEOUT_S, wait_until
from rrl.tests.support.roles.trainer import publishing
from rrl.tests.support.roles.trainer.publishing import PublishingWorker
from rrl.tests.support.roles.trainer.stage import END_TIMEOUT_S

pytestmark = pytest.mark.torch

_BESIDE = 0.15
"""Memory beside the version that a process may need, as a share of the model.

A second copy would need half of the model (bfloat16) or all of it. The largest tensor is 4 % of this model.
"""


class Scene:
    """A publisher of two small tensors, and the host buffers of a trainer."""

    def __init__(self, staleness: int | None = None, buffers: int = 2) -> None:
        self.me = PublishingWorker(staleness)
        self.live = {"a": torch.arange(5.0), "b": torch.arange(6).reshape(2, 3)}
        self.failed: list[BaseException] = []
        me: Any = self.me
        learner: Any = SimpleNamespace(weights=lambda: self.live, saved_weights=lambda: self.live, adapters=None)
        self.publisher = Publisher(me, Gang(), learner, torch.bfloat16, fail=self.failed.append)
        self._saved = {f"model.{name}": tensor for name, tensor in self.live.items()}
        self._layout = Layout(self._saved)
        self._buffers = [memoryview(bytearray(self._layout.nbytes)) for _ in range(buffers)]

    def save(self, number: int) -> None:
        """Make the copy of a step as the saver does, with the step's number as the value of all weights."""
        buffer = self._buffers[number % len(self._buffers)]
        self.publisher.reserve(buffer)
        for tensor in self.live.values():
            tensor.fill_(number)
        self._layout.fill(buffer, self._saved)
        self.publisher.offer(number, self._layout.views(buffer), buffer)

    def hang(self) -> None:
        """Let the publishing thread stop in the middle of the next version."""
        self.me.publishing.clear()
        self.me.may_publish.clear()

    def has_announced(self, number: int) -> bool:
        return self.me.announced[-1] == number

    def complete(self, number: int) -> bool:
        return all(bool((tensor == number).all()) for tensor in self.me.tensors(number).values())


def _in_a_thread(do: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def scenes() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(*args: Any, **settings: Any) -> Scene:
        made.append(Scene(*args, **settings))
        return made[-1]

    yield make
    for scene in made:
        scene.me.may_publish.set()


def test_each_version_has_the_cast_values_of_its_step_and_unchanged_integers(scenes: Callable[..., Scene]) -> None:
    scene = scenes()
    scene.publisher.publish_live(0)
    assert torch.equal(scene.me.tensors(0)["a"], torch.arange(5.0).to(torch.bfloat16))
    assert torch.equal(scene.me.tensors(0)["b"], torch.arange(6).reshape(2, 3))
    for number in range(1, 4):
        scene.save(number)
        wait_until(partial(scene.has_announced, number))
        assert scene.complete(number)
    scene.publisher.finish()
    assert scene.me.announced == [0, 1, 2, 3]


def test_partial_version_is_never_current_and_training_continues_meanwhile(scenes: Callable[..., Scene]) -> None:
    scene = scenes()
    scene.publisher.publish_live(0)
    scene.hang()
    scene.save(1)
    assert scene.me.publishing.wait(TIMEOUT_S)
    current = scene.me.store.current()
    assert current is not None
    assert current.manifest.version == Version(0, 1)
    scene.save(2)  # the other buffer
    assert scene.me.announced == [0]
    assert scene.publisher.take_blocked_s() == 0.0
    scene.me.may_publish.set()
    scene.publisher.finish()
    assert scene.me.announced == [0, 1, 2]


def test_wait_for_a_buffer_that_is_being_published_is_counted_and_reported_as_phase_publish(
    scenes: Callable[..., Scene],
) -> None:
    scene = scenes(buffers=1)
    scene.hang()
    scene.save(1)
    assert scene.me.publishing.wait(TIMEOUT_S)
    training = _in_a_thread(lambda: scene.save(2))
    wait_until(lambda: scene.me.phases == ["publish"])
    assert scene.live["a"][0] == 1, "the copy was overwritten while it was being published"
    scene.me.may_publish.set()
    training.join(TIMEOUT_S)
    assert scene.publisher.take_blocked_s() > 0
    assert scene.publisher.take_blocked_s() == 0
    assert scene.me.phases == []
    scene.publisher.finish()
    assert scene.me.announced == [1, 2]
    assert scene.complete(1)
    assert scene.complete(2)


def test_publisher_that_was_overtaken_skips_to_the_copy_that_is_being_made(scenes: Callable[..., Scene]) -> None:
    scene = scenes()
    scene.hang()
    scene.save(1)
    assert scene.me.publishing.wait(TIMEOUT_S)
    scene.save(2)
    training = _in_a_thread(lambda: scene.save(3))  # into the memory of the copy of step 1
    wait_until(lambda: scene.me.phases == ["publish"])
    scene.me.may_publish.set()
    training.join(TIMEOUT_S)
    scene.publisher.finish()
    assert scene.me.announced == [1, 3]
    assert scene.complete(3)


def test_copy_in_the_only_buffer_is_published_without_waiting_for_a_newer_one(scenes: Callable[..., Scene]) -> None:
    scene = scenes(buffers=1)
    for number in range(1, 50):
        scene.save(number)
    scene.publisher.finish()
    assert scene.me.announced == list(range(1, 50))


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("staleness", [0, *(pytest.param(one, marks=pytest.mark.long) for one in (1, 2, 4, None))])
def test_hung_publication_stops_training_in_phase_publish_and_never_for_lack_of_data(
    scenes: Callable[..., Scene], staleness: int | None, buffers: int
) -> None:
    scene, steps, trained = scenes(staleness, buffers), 12, list[int]()
    scene.publisher.publish_live(0)

    def train() -> None:
        for number in range(1, steps + 1):
            oldest = number - 1 - (steps if staleness is None else staleness)
            assert scene.me.announced[-1] >= oldest, (
                "this step was trained though no rollout has weights that are new enough to sample for it"
            )
            trained.append(number)
            scene.save(number)
            assert scene.me.publishing.wait(TIMEOUT_S)  # so that no copy is skipped before the thread hangs

    scene.hang()
    training = _in_a_thread(train)
    wait_until(lambda: scene.me.phases == ["publish"])
    assert trained == list(range(1, 2 + min(buffers, steps if staleness is None else staleness)))
    assert scene.me.announced == [0]
    scene.me.may_publish.set()
    training.join(TIMEOUT_S)
    assert not training.is_alive()
    scene.publisher.finish()
    assert trained[-1] == scene.me.announced[-1] == steps
    assert scene.failed == []


@pytest.mark.parametrize("buffers", [1, 2])
def test_publisher_slower_than_training_publishes_within_every_two_steps(
    scenes: Callable[..., Scene], buffers: int
) -> None:
    """Both threads pause at random.

    For each step, its own version or that of the next step is published.
    """
    scene, dice = scenes(None, buffers), random.Random(buffers)
    done = threading.Event()

    def stutter() -> None:
        while not done.is_set():
            scene.me.may_publish.clear()
            done.wait(dice.random() * 4e-3)
            scene.me.may_publish.set()
            done.wait(dice.random() * 1e-3)

    stuttering = _in_a_thread(stutter)
    for number in range(1, 200):
        scene.save(number)
        done.wait(random.Random(number).random() * 1e-3)
    scene.publisher.finish()
    done.set()
    stuttering.join()
    assert scene.me.announced[-1] == 199
    steps = [0, *scene.me.announced]
    assert all(0 < later - earlier <= buffers for earlier, later in itertools.pairwise(steps))


def test_the_same_step_is_not_published_twice(scenes: Callable[..., Scene]) -> None:
    """A restored snapshot is published at the start, and saved again for its commit."""
    scene = scenes()
    scene.publisher.publish_live(3)
    scene.save(3)
    scene.publisher.finish()
    assert scene.me.announced == [3]


def test_error_of_the_publishing_thread_ends_the_process_and_is_raised_in_the_training_thread(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scenes(buffers=1)
    error = RuntimeError("no memory for the version")

    def allocate(nbytes: int) -> memoryview:
        raise error

    monkeypatch.setattr(scene.me.store, "allocate", allocate)
    scene.save(1)
    with pytest.raises(RuntimeError, match="no memory"):
        scene.publisher.finish()
    wait_until(lambda: scene.failed == [error])


def test_a_requested_stop_is_not_an_error_of_the_publishing_thread(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scenes()

    def allocate(nbytes: int) -> memoryview:
        raise Stopping

    monkeypatch.setattr(scene.me.store, "allocate", allocate)
    scene.save(1)
    with pytest.raises(Stopping):
        scene.publisher.finish()
    assert scene.failed == []


# ── real processes ─────────────────────────────────────────────────────────────────────────────────────────────────
def _run(processes: ForkServerContext, play: Callable[..., None], world: int, *words: Any) -> None:
    members = [processes.Process(target=play, args=(rank, world, *words), daemon=True) for rank in range(world)]
    try:
        for member in members:
            member.start()
        for member in members:
            member.join(END_TIMEOUT_S)
    finally:
        for member in members:
            member.kill()
            member.join()
    assert [member.exitcode for member in members] == [0] * world


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_a_sharded_model_is_published_and_taken_over_without_a_second_copy_of_it(
    tmp_path: Path, processes: ForkServerContext, dtype: str
) -> None:
    _run(processes, publishing.play, 2, str(tmp_path), dtype)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    version, beside = first["version"], _BESIDE * first["model"]
    assert version == first["model"] * (2 if dtype == "bfloat16" else 4) / 4 > 100e6
    for source in ("live", "copy"):
        assert first[source] < version + beside, first
        assert second[source] < beside, second
    assert first["loading"] < beside, first
    assert first["right"]


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        (2, "bfloat16"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((1, "float32"), (1, "bfloat16"), (2, "float32"))),
    ],
)
def test_published_bits_are_those_of_the_models_cast_weights_after_each_step(
    tmp_path: Path, processes: ForkServerContext, world: int, dtype: str
) -> None:
    _run(processes, publishing.compare, world, str(tmp_path), dtype, _batches(3))
    result = json.loads((tmp_path / "rank-0.json").read_text())
    assert result == {"equal": {str(number): True for number in range(4)}, "committed": [1, 2, 3]}


def _batches(steps: int) -> list[Batch]:
    dice = random.Random(0)
    trajectories = tuple(
        Trajectory(
            id=number,
            group=number // 2,
            prompt=(2, 3),
            tokens=tuple(dice.randrange(1, 13) for _ in range(3)),
            logprobs=(-2.5,) * 3,
            versions=(Version(0, 1),) * 3,
            reward=dice.random(),
            training=dice.random(),
        )
        for number in range(6)
    )
    return [Batch(number, (), f"batch {number}", trajectories) for number in range(1, steps + 1)]
