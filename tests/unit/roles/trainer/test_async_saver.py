"""The saving thread, with a worker that commits when the test permits it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrl.core.phases import phase
from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.roles.checkpoints.folders import Digest, describe, fresh_folder, make_durable
from rrl.roles.checkpoints.stored_tensors import INDEX
from rrl.roles.snapshots.client import SnapshotClient
from rrl.roles.snapshots.server import SnapshotServer
from rrl.roles.trainer import async_saver as saver_module
from rrl.roles.trainer import checkpoint
from rrl.roles.trainer.async_saver import COMMITS_CAUSE, AsyncSaver
from rrl.roles.trainer.checkpoint import Checkpoints, Written
from rrl.roles.trainer.host_buffers import HostBuffers, Layout
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.process_group import COLLECTIVE_TIMEOUT_S, Gang
from rrl.roles.trajectories.types import TrainedStep
from rrl.roles.worker.connection import Stopping
from rrl.roles.worker.status import external_waits
from rrl.roles.worker.uncommitted_steps import UncommittedSteps
from rrl.tests.support.listening_manager import TIMEOUT_S, Lab, wait_until
from rrl.tests.support.roles.trainer import harness

pytestmark = pytest.mark.torch


class Worker(SimpleNamespace):
    """A worker that commits once ``may_commit`` is set, or raises the exception in ``raises`` if there is one."""

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(
            run_dir=run_dir, launch=SimpleNamespace(incarnation=Incarnation(ReplicaId("trainer/0"), 1)), world=1
        )
        self.uncommitted = UncommittedSteps()
        self.stopping = threading.Event()
        self.may_commit = threading.Event()
        self.idle_causes: list[str] = []
        self.commits: list[tuple[int, set[str]]] = []
        self.metrics: list[dict[str, float]] = []
        self.earlier: list[list[int]] = []
        self.raises: BaseException | None = None

    @contextmanager
    def idle(self, cause: str) -> Iterator[None]:
        self.idle_causes.append(cause)
        yield
        self.idle_causes.remove(cause)

    def checkpoint_dir(self, number: int) -> Path:
        return fresh_folder(self.run_dir.checkpoints, number, 1)

    def commit(self, number: int, files: Sequence[Path], metrics: Any, digests: dict[str, Digest]) -> None:
        assert self.may_commit.wait(TIMEOUT_S)
        if self.raises is not None:
            raise self.raises
        self.commits.append((number, set(digests)))
        self.metrics.append(metrics)
        self.earlier.append([step.number for step in self.uncommitted.before(number)])
        self.uncommitted.remove_through(number)


class NoPublisher(SimpleNamespace):
    """Replaces the publisher: it reads no copy, and records the copies that it was offered."""

    def __init__(self) -> None:
        super().__init__(offered=list[int](), reserved=list[int](), finished=False)

    def reserve(self, buffer: memoryview) -> None:
        self.reserved.append(len(self.offered))

    def take_blocked_s(self) -> float:
        return 0.25

    def offer(self, number: int, tensors: dict[str, torch.Tensor], buffer: memoryview) -> None:
        self.offered.append(number)

    def finish(self) -> None:
        self.finished = True


class Scene:
    def __init__(
        self, path: Path, max_uncommitted: int, checkpoint_every: int = 1, client: SnapshotClient | None = None
    ) -> None:
        run = RunDir(path / "run")
        run.create()
        self.me = Worker(run)
        self.student: Learner = harness.learner()
        self.failed: list[BaseException] = []
        checkpoints = Checkpoints(run)
        buffers = HostBuffers(client, own=max_uncommitted)
        me: Any = self.me
        self.publisher = NoPublisher()
        publisher: Any = self.publisher
        self.saver = AsyncSaver(
            me,
            Gang(),
            self.student,
            checkpoints,
            buffers,
            publisher,
            max_uncommitted,
            fail=self.failed.append,
            uncommitted=self.me.uncommitted,
            is_checkpoint_step=lambda step: step % checkpoint_every == 0,
        )

    def save(self, number: int) -> None:
        self.student.number = number
        self.me.uncommitted.restore([TrainedStep(number, f"binding {number}", {})])
        self.saver.save(f"binding {number}", {})

    def saving(self, number: int) -> threading.Thread:
        """Save a step in a thread of its own, and return the thread."""
        thread = threading.Thread(target=self.save, args=(number,), daemon=True)
        thread.start()
        return thread


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(tmp_path, getattr(request, "param", 1))
    yield made
    made.me.may_commit.set()


def test_collectives_wait_longer_than_the_manager_allows_any_phase() -> None:
    """In a collective a member waits for the slowest one, and the training thread may wait for the saving thread."""
    assert max(phase(name).longest for name in ("train", "checkpoint", "publish")) < COLLECTIVE_TIMEOUT_S


@pytest.mark.parametrize("scene", [1, 2], indirect=True, ids=str)
def test_steps_are_saved_concurrently_up_to_the_uncommitted_limit(scene: Scene, request: pytest.FixtureRequest) -> None:
    most = request.node.callspec.params["scene"]
    for number in range(1, most + 1):
        scene.save(number)
    waiting = scene.saving(most + 1)
    waiting.join(0.2)
    assert waiting.is_alive()
    assert scene.me.idle_causes == [COMMITS_CAUSE]
    assert scene.me.commits == []
    scene.me.may_commit.set()
    waiting.join(TIMEOUT_S)
    scene.saver.finish()
    assert scene.me.idle_causes == []
    assert [number for number, _ in scene.me.commits] == list(range(1, most + 2))
    assert all({INDEX, "weights-0.safetensors", "rank-0.msgpack"} < files for _, files in scene.me.commits)


@pytest.mark.parametrize("most", [1, 2])
def test_commits_cover_the_steps_since_the_last_checkpoint_and_the_last_step_has_one(tmp_path: Path, most: int) -> None:
    scene = Scene(tmp_path, most, checkpoint_every=3)
    scene.me.may_commit.set()
    for number in range(1, 9):
        scene.save(number)
    scene.saver.finish()
    assert [number for number, _ in scene.me.commits] == [3, 6, 8]
    assert scene.me.earlier == [[1, 2], [4, 5], [7]]
    assert scene.publisher.offered == list(range(1, 9))


@pytest.mark.parametrize("most", [1, 2])
def test_memory_of_a_checkpoint_that_is_being_written_is_not_overwritten(tmp_path: Path, most: int) -> None:
    scene = Scene(tmp_path, most, checkpoint_every=3)
    for number in range(1, 3 + most):
        scene.save(number)
    waiting = scene.saving(3 + most)
    waiting.join(0.2)
    assert waiting.is_alive()
    assert (scene.me.commits, scene.me.idle_causes) == ([], [COMMITS_CAUSE])
    scene.me.may_commit.set()
    waiting.join(TIMEOUT_S)
    scene.saver.finish()
    assert [number for number, _ in scene.me.commits] == sorted({3, 3 + most})


def test_committed_state_is_that_of_the_call_and_not_of_a_later_step(scene: Scene) -> None:
    before = harness.saved(scene.student)
    scene.save(1)
    for tensor in scene.student.tensors().values():
        tensor.data.zero_()
    scene.me.may_commit.set()
    scene.saver.finish()
    (folder,) = scene.me.run_dir.checkpoints.iterdir()
    files = [path for path in folder.iterdir() if path.name in scene.me.commits[0][1]]
    other = harness.learner(seed=5)
    Checkpoints(scene.me.run_dir).read(describe(scene.me.run_dir.path, files), other)
    assert other.number == 1
    assert all((tensor == before[0][name]).all() for name, tensor in other.tensors().items())


@pytest.fixture(params=["in the agent", "in the process"])
def client(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SnapshotClient | None]:
    """Provide a client of a real snapshot server, or None."""
    if request.param == "in the process":
        yield None
        return
    lab = Lab(tmp_path / "agent")
    server = SnapshotServer(lab.run.id, NodeName("n"), lab.keys, "127.0.0.1")
    server.start()
    made = SnapshotClient(lab.run.id, NodeName("n"), lab.keys, ReplicaId("trainer/0"), 0, 1)
    yield made
    made.close()
    server.close()


def test_host_copy_is_that_of_the_last_step_until_the_next_one_is_saved(
    tmp_path: Path, client: SnapshotClient | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the other threads do with it: from it, a trainer that has lent its GPUs restores its state."""
    fill, filled = Layout.fill, list[int]()

    def counted(layout: Layout, *words: Any) -> None:
        filled.append(1)
        fill(layout, *words)

    monkeypatch.setattr(Layout, "fill", counted)
    scene = Scene(tmp_path, 2, checkpoint_every=2, client=client)
    scene.me.may_commit.set()
    for number in range(5):
        for tensor in scene.student.tensors().values():
            tensor.data.normal_()
        if number:
            scene.save(number)
        expected, _ = harness.saved(scene.student)
        copy = scene.saver.host_copy()
        for tensor in scene.student.tensors().values():
            tensor.data.zero_()
        if client is not None:
            client.wait_until_sealed()
            assert {each.step for each in client.list_snapshots()} == {*range(max(1, number - 1), number + 1)}
        wait_until(lambda: not scene.saver._written)
        assert scene.saver.host_copy() is copy
        assert len(filled) == 1 + number, "a further copy was made"
        scene.saver.layout.load(copy, scene.student.tensors())
        assert all(torch.equal(tensor, expected[name]) for name, tensor in scene.student.tensors().items())
    scene.saver.finish()


def test_copy_is_offered_to_the_publisher_before_its_commit_and_blocked_time_is_a_metric(scene: Scene) -> None:
    scene.save(1)
    assert scene.publisher.offered == [1]
    assert scene.me.commits == []
    scene.me.may_commit.set()
    scene.save(2)
    scene.saver.finish()
    assert scene.publisher == SimpleNamespace(offered=[1, 2], reserved=[0, 1], finished=True)
    assert scene.me.metrics == [{"publish_blocked_s": 0.25}] * 2


def test_member_that_waits_for_the_commit_reports_that_it_waits_for_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    me, waits, given = Worker(run), list[str](), list[list[str]]()

    @contextmanager
    def held_up_by(whom: str) -> Iterator[None]:
        waits.append(whom)
        yield
        waits.pop()

    def from_first(saver: AsyncSaver, do: Any, kind: Any) -> Any:
        given.append(list(waits))
        return str(fresh_folder(run.checkpoints, 1, 1)), Written({})

    me.blocked_on = held_up_by
    monkeypatch.setattr(AsyncSaver, "_broadcast_from_rank0", from_first)
    other: Any = me
    publisher: Any = NoPublisher()
    second = AsyncSaver(other, Gang(1, 2), harness.learner(), Checkpoints(run), HostBuffers(), publisher, 1)
    second.save("binding", {})
    second.finish()
    # what rank 1 waits for: nothing for the folder's name, and rank 0 for the commit
    assert given == [[], ["trainer/0"]]


def test_saving_error_ends_the_process_and_is_raised_by_the_next_save(scene: Scene) -> None:
    scene.me.raises = RuntimeError("refused for good")
    scene.me.may_commit.set()
    scene.save(1)
    with pytest.raises(RuntimeError, match="refused for good"):
        scene.saver.finish()
    wait_until(lambda: scene.failed == [scene.me.raises])


def test_stop_request_is_no_error(scene: Scene) -> None:
    scene.me.raises = Stopping()
    scene.me.may_commit.set()
    scene.save(1)
    with pytest.raises(Stopping):
        scene.saver.finish()
    assert scene.failed == []


def test_full_disk_during_the_creation_of_a_folder_is_waited_out(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saver_module, "_DISK_FULL_RETRY_S", 0.01)
    troubles = [errno.ENOSPC, errno.EDQUOT]
    real = Path.mkdir

    def mkdir(path: Path, *args: Any, **named: Any) -> None:
        if troubles:
            number = troubles.pop()
            raise OSError(number, os.strerror(number), str(path))
        real(path, *args, **named)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    scene.me.may_commit.set()
    scene.save(1)
    scene.saver.finish()
    assert [number for number, _ in scene.me.commits] == [1]
    assert caplog.text.count("; trying again") == 2


def test_full_disk_is_waited_out_and_another_error_is_raised(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saver_module, "_DISK_FULL_RETRY_S", 0.01)
    monkeypatch.setattr(external_waits, "REPORTED_AFTER_S", 0.0)
    monkeypatch.setattr(saver_module, "_ATTEMPTS_PER_WAIT", 2)
    troubles, awaited, began = [errno.ENOSPC] * 4, list[str](), set[float]()

    def failing(folder: Path, names: list[str]) -> dict[str, Digest]:
        awaited.append(external_waits.awaited_service())
        began.add(external_waits._waiting_since)
        if troubles:
            number = troubles.pop()
            raise OSError(number, os.strerror(number))
        return make_durable(folder, names)

    monkeypatch.setattr(checkpoint, "make_durable", failing)
    scene.me.may_commit.set()
    scene.save(1)
    scene.save(2)
    assert caplog.text.count("No space left on device; trying again") == 4
    assert len(began) == 4, "the wait was not begun anew with every second attempt"
    wait_until(lambda: len(scene.me.commits) == 2)
    assert (awaited[0], external_waits.awaited_service()) == ("", "")
    assert any(text.endswith("[Errno 28] No space left on device") for text in awaited), "status names no wait"
    troubles.append(errno.EIO)
    scene.save(3)
    with pytest.raises(OSError, match="Input/output error"):
        scene.saver.finish()
    assert [number for number, _ in scene.me.commits] == [1, 2]
