from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import msgspec
import numpy as np
import pytest
import torch

import rrl
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.launch import Launch
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import ModelSpec, RunSpec, TokenizerSpec
from rrl.core.task_spec import TaskSpec
from rrl.core.types import Incarnation, NodeName, ReplicaId, Version
from rrl.roles.checkpoints.folders import describe, fresh_folder
from rrl.roles.launcher.end_report import Unrepairable
from rrl.roles.models.policy import build_model
from rrl.roles.models.tensors import PackedTensor, unpack
from rrl.roles.models.tokenizer import EOS, open_tokenizer
from rrl.roles.rollout import main as rollout_main
from rrl.roles.rollout.engine import Sampling
from rrl.roles.rollout.torch_engine import TorchEngine
from rrl.roles.trainer import main as trainer_main
from rrl.roles.trainer import process_group, restore
from rrl.roles.trainer.async_saver import AsyncSaver, SnapshotMeta
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.publisher import Publisher
from rrl.roles.trainer.restore import Commit, RestorePoint
from rrl.roles.trajectories.batches import Batch, Part
from rrl.roles.trajectories.types import Item, Segment, TrainedStep
from rrl.roles.worker.uncommitted_steps import UncommittedSteps
from rrl.tests.support.roles.trainer import harness
from rrl.transport.weights.manifest import TensorSpec, layout

pytestmark = pytest.mark.torch

_STEPS = 4
_COMMIT_TIMEOUT_S = 60.0


class _Died(Exception):
    """Ends the process as a kill would."""


def _job(checkpoint_every: int = 1) -> RunSpec:
    job = Job.model_validate(
        {
            "run": {"name": "test", "steps": _STEPS, "seed": 3},
            "model": {"hidden_size": 32, "intermediate_size": 64, "tokenizer": {"pieces": "0123456789="}},
            "task": {"function": f"{__name__}:_Sums"},
            "roles": {
                "trainer": {"snapshots": False, "checkpoint_every": checkpoint_every},
                "rollout": {"segment_tokens": 2},
            },
        }
    )
    return resolve(job, "python")


class _Version:
    def __init__(self, version: Version, tensors: Sequence[PackedTensor]) -> None:
        specs, nbytes = layout([(name, dtype, shape, content.nbytes) for name, dtype, shape, content in tensors])
        flat = memoryview(bytearray(nbytes))
        for spec, (_, _, _, content) in zip(specs, tensors, strict=True):
            flat[spec.offset : spec.offset + spec.nbytes] = content
        self.version = version
        self.tensors: tuple[TensorSpec, ...] = specs
        self.flat = flat.toreadonly()


class _Worker:
    """The interface of :class:`rrl.roles.worker.api.Worker`, in memory.

    ``committed`` outlives the worker, as the store does.
    """

    def __init__(
        self,
        replica: str,
        number: int,
        run_dir: RunDir,
        committed: dict[int, dict[str, Any]],
        checkpoint_every: int = 1,
    ) -> None:
        incarnation = Incarnation(ReplicaId(replica), number)
        folder = str(run_dir.path)
        self.launch = Launch("tag", folder, incarnation, NodeName("n"), (), {}, folder, 1.0, False)
        self.run_dir = run_dir
        self.job = _job(checkpoint_every)
        self.rollout = self.job.rollouts["rollout"]
        self.uncommitted = UncommittedSteps()
        self.rank, self.world, self.node, self.peers = 0, 1, NodeName("n"), None
        self.stopping = threading.Event()
        self.phases: list[str] = []
        self.notes: list[str] = []
        self.published: list[_Version] = []
        self.commits = committed
        self.metrics: list[dict[str, float]] = []
        self.queue: list[Part] = []
        self.dies_before_commit_of: int | None = None
        self.dies_after: tuple[int, int] | None = None
        """The part, as (step, index), after which the trainer dies once the previous step is committed."""
        self.dies_while_publishing: int | None = None
        """The version of which the trainer publishes one tensor, and dies once the version's step is committed."""
        self.committed_now = threading.Condition()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None: ...

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def idle(self, cause: str) -> Iterator[None]:
        yield

    @property
    def committed(self) -> int | None:
        return max(self.commits, default=None)

    @property
    def committed_manifest(self) -> dict[str, Any] | None:
        return self.commits[max(self.commits)] if self.commits else None

    def parts(self, after: int | None = None, *share: object) -> Iterator[Part]:
        for part in self.queue:
            if part.number > (after or 0):
                if part.last:
                    self.uncommitted.restore([TrainedStep(part.number, part.digest, {})])
                yield part
                if (part.number, part.index) == self.dies_after:
                    self._die_once_committed(part.number - 1)

    def _die_once_committed(self, number: int) -> NoReturn:
        with self.committed_now:
            assert self.committed_now.wait_for(partial(self.commits.__contains__, number), _COMMIT_TIMEOUT_S)
        raise _Died

    def checkpoint_dir(self, number: int) -> Path:
        return fresh_folder(self.run_dir.checkpoints, number, self.launch.incarnation.number)

    def commit(self, number: int, files: Sequence[Path], metrics: dict[str, float], digests: dict[str, Any]) -> None:
        if number == self.dies_before_commit_of:
            raise _Died
        assert digests.keys() == {path.name for path in files}
        self.metrics += [*(step.metrics for step in self.uncommitted.before(number)), metrics]
        self.uncommitted.remove_through(number)
        with self.committed_now:
            self.commits[number] = describe(self.run_dir.path, files)
            self.committed_now.notify_all()

    def publish_written(
        self,
        number: int,
        described: Sequence[tuple[str, str, tuple[int, ...], int]],
        writes: Iterable[Callable[[memoryview], None]],
    ) -> None:
        tensors: list[PackedTensor] = []
        for (name, dtype, shape, nbytes), write in zip(described, writes, strict=True):
            content = memoryview(bytearray(nbytes))
            write(content)
            if number == self.dies_while_publishing:
                self._die_once_committed(number)
            tensors.append((name, dtype, shape, content))
        self.published.append(_Version(Version(number, self.launch.incarnation.number), tensors))


def _run_dir(path: Path) -> RunDir:
    made = RunDir(path)
    made.create()
    return made


def _spec() -> ModelSpec:
    return _job().model


def _batches() -> list[Batch]:
    engine = TorchEngine(build_model(_spec(), 13, 3), stop_tokens=frozenset({EOS}), seed=1)
    engine.load(Version(0, 1), build_model(_spec(), 13, 3).state_dict().items())

    def score(item: int, tokens: tuple[int, ...]) -> tuple[float, float]:
        return float(tokens[0] % 2), tokens[0] / 13

    return [harness.sampled_batch(engine, [(2, 3, 4), (5, 6)], n * 2, 4, 3, n, score) for n in range(1, _STEPS + 1)]


def _train(
    monkeypatch: pytest.MonkeyPatch, worker: _Worker, batches: list[Batch], sizes: Sequence[int] = (2,)
) -> _Worker:
    """Play a trainer. ``sizes`` are the numbers of groups in the parts of a step."""
    worker.queue = [part for batch in batches for part in harness.parts_of(batch, sizes)]
    monkeypatch.setattr(rrl, "join", lambda: worker, raising=False)
    monkeypatch.setattr(
        trainer_main, "AsyncSaver", partial(AsyncSaver, fail=lambda _: None)
    )  # else it would end pytest
    trainer_main.main()
    return worker


def _learned(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the metrics of each step except times."""
    return [{name: value for name, value in step.items() if name != "publish_blocked_s"} for step in metrics]


def _bytes(version: _Version) -> bytes:
    return bytes(version.flat)


def test_each_step_is_trained_committed_and_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = _train(monkeypatch, _Worker("trainer/0", 1, _run_dir(tmp_path / "run"), {}), _batches())
    assert worker.phases[:4] == ["train", "publish", "train", "checkpoint"]
    assert [each.version.step for each in worker.published] == [0, 1, 2, 3, 4]
    assert sorted(worker.commits) == [1, 2, 3, 4]
    assert [metrics["tokens"] for metrics in worker.metrics] == [
        sum(len(each.tokens) for each in part.trajectories) for part in worker.queue
    ]


def test_each_part_is_trained_when_it_comes_and_its_step_is_committed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batches = _batches()
    whole = _train(monkeypatch, _Worker("trainer/0", 1, _run_dir(tmp_path / "whole"), {}), batches)
    parts = _train(monkeypatch, _Worker("trainer/0", 1, _run_dir(tmp_path / "parts"), {}), batches, (1, 1))
    assert parts.phases[:5] == ["train", "publish", "train", "train", "checkpoint"]
    assert parts.phases.count("train") == 1 + 2 * _STEPS
    published = [each.version.step for each in parts.published]
    assert published[0] == 0, "the first weights were not published before the first step"
    assert published[-1] == _STEPS, "the last weights were not published"
    assert published == sorted(set(published)), "a version was published twice, or after a newer one"
    for got, wanted in zip(_learned(parts.metrics), _learned(whole.metrics), strict=True):
        assert got == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    end, wanted_end = (
        torch.frombuffer(bytearray(each.published[-1].flat), dtype=torch.float32) for each in (parts, whole)
    )
    assert 0 < (end - wanted_end).abs().max() < 1e-5, (
        "the weights must differ by rounding only, and not be equal: parts are summed in another order"
    )


def test_trainer_killed_after_a_part_ends_with_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batches = _batches()
    undisturbed = _train(monkeypatch, _Worker("trainer/0", 1, _run_dir(tmp_path / "whole"), {}), batches, (1, 1))
    run_dir, commits = _run_dir(tmp_path / "run"), {}  # type: tuple[RunDir, dict[int, dict[str, Any]]]
    first = _Worker("trainer/0", 1, run_dir, commits)
    first.dies_after = 3, 0
    with pytest.raises(_Died):
        _train(monkeypatch, first, batches, (1, 1))
    second = _train(monkeypatch, _Worker("trainer/0", 2, run_dir, commits), batches, (1, 1))
    assert _bytes(second.published[-1]) == _bytes(undisturbed.published[-1])
    assert _learned(first.metrics + second.metrics) == _learned(undisturbed.metrics)


def test_digest_of_an_uncommitted_snapshot_is_compared_with_the_last_part_of_its_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[tuple[str, dict[str, float]]] = []

    def load(_: RestorePoint, learner: Learner, *__: object) -> None:
        learner.model.load_state_dict(build_model(_spec(), 13, 3).state_dict())
        learner.number = 1

    def resumed(digest: str) -> _Worker:
        note = SnapshotMeta(1, 1, "layout", b"", digest, {"loss": 2.0})
        monkeypatch.setattr(restore, "agree_on_restore_point", lambda *_: RestorePoint(Commit(0, None), note))
        monkeypatch.setattr(restore, "load", load)
        monkeypatch.setattr(AsyncSaver, "save", lambda _, digest, metrics: saved.append((digest, metrics)))
        monkeypatch.setattr(AsyncSaver, "finish", lambda _: None)
        worker = _Worker("trainer/0", 2, _run_dir(tmp_path / digest), {})
        return _train(monkeypatch, worker, _batches()[:2], (1, 1))

    assert [each.version.step for each in resumed("binding-1.1").published] == [1]
    assert saved[0] == ("binding-1.1", {"loss": 2.0})
    assert [digest for digest, _ in saved] == ["binding-1.1", "binding-2.1"]
    with pytest.raises(RuntimeError, match="the snapshot of step 1 was trained on another batch"):
        resumed("binding-1.0")


def test_trainer_killed_before_a_commit_ends_with_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batches = _batches()
    undisturbed = _train(monkeypatch, _Worker("trainer/0", 1, _run_dir(tmp_path / "whole"), {}), batches)
    run_dir, commits = _run_dir(tmp_path / "run"), {}  # type: tuple[RunDir, dict[int, dict[str, Any]]]
    first = _Worker("trainer/0", 1, run_dir, commits)
    first.dies_before_commit_of = 3
    with pytest.raises(_Died):
        _train(monkeypatch, first, batches)
    second = _train(monkeypatch, _Worker("trainer/0", 2, run_dir, commits), batches)

    assert second.phases[:2] == ["checkpoint", "publish"]
    assert second.published[0].version == Version(2, 2)
    assert _bytes(second.published[0]) == _bytes(first.published[2])
    assert [each.version.step for each in second.published] == [2, 3, 4]
    assert _bytes(second.published[-1]) == _bytes(undisturbed.published[-1])
    assert _learned(first.metrics + second.metrics) == _learned(undisturbed.metrics)


@pytest.mark.parametrize(("every", "dies_before", "restored"), [(3, 3, 0), (3, 4, 3), (5, 4, 0)])
def test_trainer_that_repeats_uncommitted_steps_ends_with_the_same_weights_and_metrics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int, dies_before: int, restored: int
) -> None:
    batches = _batches()
    undisturbed = _train(monkeypatch, _Worker("trainer/0", 1, _run_dir(tmp_path / "whole"), {}), batches)
    run_dir, commits = _run_dir(tmp_path / "run"), {}  # type: tuple[RunDir, dict[int, dict[str, Any]]]
    first = _Worker("trainer/0", 1, run_dir, commits, every)
    first.dies_before_commit_of = dies_before
    with pytest.raises(_Died):
        _train(monkeypatch, first, batches)
    second = _train(monkeypatch, _Worker("trainer/0", 2, run_dir, commits, every), batches)
    assert second.published[0].version == Version(restored, 2)
    assert sorted(commits) == sorted({number for number in (every, _STEPS) if number <= _STEPS})
    assert _bytes(second.published[-1]) == _bytes(undisturbed.published[-1])
    assert _learned(first.metrics + second.metrics) == _learned(undisturbed.metrics)


def test_trainer_that_is_stopped_between_two_checkpoints_commits_its_last_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = _train(monkeypatch, _Worker("trainer/0", 1, _run_dir(tmp_path / "run"), {}, 3), _batches()[:2])
    assert sorted(worker.commits) == [2]
    assert len(worker.metrics) == 2


def test_trainer_that_diverges_between_two_checkpoints_commits_the_last_good_step_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second, third, _ = _batches()
    spoiled = msgspec.structs.replace(third.trajectories[0], training=float("nan"))
    third = msgspec.structs.replace(third, trajectories=(spoiled, *third.trajectories[1:]))
    worker = _Worker("trainer/0", 1, _run_dir(tmp_path / "run"), {}, 4)
    with pytest.raises(Unrepairable, match="the gradient is not finite in step 3: loss nan"):
        _train(monkeypatch, worker, [first, second, third])
    assert sorted(worker.commits) == [2]
    assert [version.version.step for version in worker.published][-1] == 2
    assert all(np.isfinite(np.frombuffer(version.flat, np.float32)).all() for version in worker.published)


def test_snapshot_of_a_step_between_two_checkpoints_is_continued_and_committed_with_the_steps_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier = tuple(TrainedStep(step, f"binding-{step}.1", {"loss": step / 2}) for step in (1, 2))
    note = SnapshotMeta(3, 1, "layout", b"", "binding-3.0", {"loss": 3.0}, earlier)
    commits: list[tuple[int, list[TrainedStep]]] = []

    def load(_: RestorePoint, learner: Learner, *__: object) -> None:
        learner.model.load_state_dict(build_model(_spec(), 13, 3).state_dict())
        learner.number = 3

    def commit(worker: _Worker, number: int, *_: object) -> None:
        commits.append((number, list(worker.uncommitted.before(number))))

    monkeypatch.setattr(restore, "agree_on_restore_point", lambda *_: RestorePoint(Commit(1, {"folder": "x"}), note))
    monkeypatch.setattr(restore, "load", load)
    monkeypatch.setattr(_Worker, "commit", commit)
    worker = _Worker("trainer/0", 2, _run_dir(tmp_path / "run"), {}, 4)
    _train(monkeypatch, worker, _batches())
    ((number, steps),) = commits
    assert (number, [step.number for step in steps]) == (4, [2, 3])
    assert [step.digest for step in steps] == ["binding-2.1", "binding-3.0"]
    assert [step.metrics["loss"] for step in steps] == [1.0, 3.0]
    assert [each.version.step for each in worker.published] == [3, 4]


def test_trainer_killed_while_publishing_publishes_the_committed_step_first_and_ends_with_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trainer_main, "Publisher", partial(Publisher, fail=lambda _: None))  # else it would end pytest
    batches = _batches()
    undisturbed = _train(monkeypatch, _Worker("trainer/0", 1, _run_dir(tmp_path / "whole"), {}), batches)
    whole = {each.version.step: _bytes(each) for each in undisturbed.published}
    run_dir, commits = _run_dir(tmp_path / "run"), {}  # type: tuple[RunDir, dict[int, dict[str, Any]]]
    first = _Worker("trainer/0", 1, run_dir, commits)
    first.dies_while_publishing, first.dies_before_commit_of = 2, 3
    with pytest.raises(_Died):
        _train(monkeypatch, first, batches)
    assert max(commits) == 2
    assert all(each.version.step < 2 for each in first.published), "a version was offered before it was complete"
    second = _train(monkeypatch, _Worker("trainer/0", 2, run_dir, commits), batches)
    assert second.published[0].version == Version(2, 2)
    for each in second.published:
        assert _bytes(each) == whole.get(each.version.step, _bytes(each))
    assert _bytes(second.published[-1]) == _bytes(undisturbed.published[-1])


def test_memory_of_a_snapshot_is_released_once_it_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fetched snapshot is as large as the member's state.

    A snapshot of this node is in memory of the agent, which must be able to use the memory again.
    """
    held, observed = [memoryview(bytearray(8))], list[bool]()
    memory = weakref.ref(held[0])
    note = SnapshotMeta(0, 1, "layout", b"", "digest", {})

    def train(*words: Any) -> None:
        observed.append(memory() is None)
        words[3].finish()  # the saver's thread

    monkeypatch.setattr(restore, "agree_on_restore_point", lambda *_: RestorePoint(Commit(0, None), note, held.pop()))
    monkeypatch.setattr(restore, "load", lambda *_: None)
    monkeypatch.setattr(trainer_main, "_train", train)
    monkeypatch.setattr(rrl, "join", lambda: _Worker("trainer/0", 2, _run_dir(tmp_path / "run"), {}), raising=False)
    trainer_main.main()
    assert observed == [True]


@pytest.mark.parametrize(("gpus", "practised"), [(0, True), (1, False)])
def test_standby_without_known_gpus_does_not_initialise_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, practised: bool
) -> None:
    worker, asked = _Worker("trainer/0", 1, _run_dir(tmp_path / "run"), {}), list[int]()
    worker.launch = msgspec.structs.replace(worker.launch, standby=True, gpus=gpus)
    monkeypatch.setattr(trainer_main, "warmup", lambda: asked.append(1))
    monkeypatch.setattr(process_group, "assigned_device", lambda _: torch.device("cpu"))
    _train(monkeypatch, worker, _batches()[:1])
    assert bool(asked) == practised


class _Sums:
    """A task that records (seed, number) of each item that is requested."""

    requested: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, i: int) -> str:
        self.requested.append((self._seed, i))
        return f"{i % 10}="

    def answer(self, i: int) -> str:
        return str(i % 10)

    def score(self, i: int, answer: str) -> tuple[float, float]:
        raise AssertionError("a warm start has scored an answer")


def test_warm_start_uses_items_that_the_run_never_samples_and_shows_its_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = _Worker("trainer/0", 1, _run_dir(tmp_path / "run"), {})
    warm_start = msgspec.structs.replace(worker.job.trainer, warm_start_steps=60, warm_start_batch=10)
    worker.job = msgspec.structs.replace(worker.job, trainer=warm_start)
    _Sums.requested.clear()
    with caplog.at_level("INFO", "rrl.trainer"):
        _train(monkeypatch, worker, [])
    assert [note.partition(", loss ")[0] for note in worker.notes] == [
        *(f"warm start {n} of 60" for n in range(1, 61)),
        "",
    ]
    assert float(worker.notes[59].partition(", loss ")[2]) < 0.5 < float(worker.notes[0].partition(", loss ")[2])
    assert worker.notes[59] in caplog.messages
    assert [i for _, i in _Sums.requested] == list(range(600))
    assert {seed for seed, _ in _Sums.requested} != {worker.job.seed}
    engine = TorchEngine(
        build_model(_spec(), 13, 0), stop_tokens=frozenset({EOS}), seed=0, sampling=Sampling(greedy=True)
    )
    engine.load(Version(0, 1), unpack(worker.published[0].tensors, worker.published[0].flat))
    tokenizer = open_tokenizer(worker.job.model)
    items = [Item(n, n, tokenizer.encode(f"{n}="), (), 3) for n in range(10)]
    for n, segments in harness.roll_out(engine, items).items():
        assert segments[0].tokens == (*tokenizer.encode(str(n)), EOS)


def test_warm_start_imports_the_task_from_the_folder_of_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rrl_warm_start_task.py").write_text(
        "class Digits:\n"
        "    def __init__(self, seed): pass\n"
        "    def prompt(self, i): return f'{i}='\n"
        "    def answer(self, i): return exit() if i == 2 else str(i)\n"
        "    def score(self, i, answer): raise AssertionError\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))  # so that the entries of load_task are removed after the test
    worker = _Worker("trainer/0", 1, _run_dir(tmp_path / "run"), {})
    worker.launch = msgspec.structs.replace(worker.launch, cwd=str(tmp_path))
    worker.job = msgspec.structs.replace(
        worker.job,
        task=TaskSpec(function="rrl_warm_start_task:Digits"),
        trainer=msgspec.structs.replace(worker.job.trainer, warm_start_steps=2, warm_start_batch=2),
    )
    tokenizer = open_tokenizer(worker.job.model)
    examples = list(trainer_main._examples(worker, tokenizer))  # type: ignore[arg-type]
    of_item = [(tokenizer.prompt(f"{i}="), (*tokenizer.encode(str(i)), EOS)) for i in range(4)]
    assert examples == [of_item[:2], of_item[3:]], "item 2 has no answer"

    settings = msgspec.structs.replace(worker.job.trainer, warm_start_steps=3, warm_start_batch=1)
    worker.job = msgspec.structs.replace(worker.job, trainer=settings)
    with pytest.raises(RuntimeError, match="the code raised SystemExit"):
        list(trainer_main._examples(worker, tokenizer))  # type: ignore[arg-type]


def test_answer_outside_the_vocabulary_ends_the_warm_start_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = _Worker("trainer/0", 1, _run_dir(tmp_path / "run"), {})
    settings = msgspec.structs.replace(worker.job.trainer, warm_start_steps=1, warm_start_batch=10)
    worker.job = msgspec.structs.replace(worker.job, trainer=settings)
    tokenizer = open_tokenizer(ModelSpec(tokenizer=TokenizerSpec(pieces=tuple("01234567="))))
    with pytest.raises(SystemExit) as ended:
        list(trainer_main._examples(worker, tokenizer))  # type: ignore[arg-type]
    assert ended.value.code == 2
    text = "no piece of [model.tokenizer] matches the text at '8=' in '8=': add '8' to `pieces` or to `ignore`"
    assert capsys.readouterr().err == f"rrl: {text}\n"


class _RolloutWorker(_Worker):
    """A worker that gives leases in sequence and then requests a stop. A version may arrive before each lease.

    ``segments`` and ``finished`` are the appends for each lease, and ``appends`` are the segments of each append.
    ``lost`` are the trajectories that the first answer names as lost.
    """

    def __init__(
        self, run_dir: RunDir, leases: Sequence[tuple[_Version | None, tuple[Item, ...]]], lost: tuple[int, ...] = ()
    ) -> None:
        super().__init__("rollout/1", 2, run_dir, {})
        self._leases = list(leases)
        self._lost = lost
        self._new: _Version | None = None
        self.segments: list[list[Segment]] = []
        self.finished: list[list[int]] = []
        self.appends: list[Sequence[Segment]] = []

    def on_probe(self, handler: Callable[[], object]) -> None:
        """Ignore the handler, because no test here sends a probe."""

    def lease(self, at_most: int, *, wait: bool = True) -> tuple[Item, ...]:
        assert at_most == self.rollout.lease
        assert wait, "the rollout has requested work while its engine is busy"
        if not self._leases:
            self.stopping.set()
            return ()
        self._new, items = self._leases.pop(0)
        self.segments.append([])
        self.finished.append([])
        return items

    def start_append(self, segments: Sequence[Segment], finished: Sequence[int], lease: int) -> SimpleNamespace:
        assert lease <= self.rollout.lease
        self.segments[-1] += segments
        self.finished[-1] += finished
        self.appends.append(segments)
        lost, self._lost = self._lost, ()
        return SimpleNamespace(answered=True, finish=lambda: (lost, ()))

    def new_weights(self) -> _Version | None:
        new, self._new = self._new, None
        return new


def test_a_rollout_loads_new_weights_before_it_works_and_hands_over_every_segment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_dir = _run_dir(tmp_path / "run")
    trainer = _train(monkeypatch, _Worker("trainer/0", 1, run_dir, {}), _batches())
    items = tuple(Item(n, n, (2, 3, 4), (), 5) for n in range(6))
    versions = [trainer.published[0], None, trainer.published[-1]]
    worker = _RolloutWorker(run_dir, [(version, items) for version in versions])
    monkeypatch.setattr(rrl, "join", lambda: worker, raising=False)
    rollout_main.main()

    assert worker.phases == ["loading_weights", "generate", "generate", "loading_weights", "generate"]
    assert [{each.version.step for each in segments} for segments in worker.segments] == [{0}, {0}, {4}]
    assert [sorted(finished) for finished in worker.finished] == [[0, 1, 2, 3, 4, 5]] * 3
    assert max(len(each.tokens) for segments in worker.segments for each in segments) == 2
    # the rollout samples new tokens, and does not repeat those of the first lease
    assert worker.segments[0] != worker.segments[1]


def test_rollout_stops_work_on_lost_trajectories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_dir = _run_dir(tmp_path / "run")
    trainer = _train(monkeypatch, _Worker("trainer/0", 1, run_dir, {}), [])
    items = tuple(Item(n, n, (2, 3, 4), (), 60) for n in range(20))
    worker = _RolloutWorker(run_dir, [(trainer.published[0], items)], lost=tuple(range(19)))
    monkeypatch.setattr(rrl, "join", lambda: worker, raising=False)
    rollout_main.main()
    (finished,) = worker.finished
    assert {segment.trajectory for segment in worker.appends[0]} == set(range(20))
    later = {segment.trajectory for segments in worker.appends[1:] for segment in segments}
    assert later <= {19}, "the rollout has appended to a trajectory that the first answer named as lost"
    assert 19 in finished


def test_memory_of_freed_tensors_goes_back_to_the_kernel_although_smaller_ones_lie_between_them() -> None:
    program = """
import sys
from pathlib import Path
from rrl.roles.trainer.main import give_back_freed_memory
give_back_freed_memory()
def kib(): return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])
first = b"x" * (16 << 20)
del first  # from now on glibc by itself keeps freed blocks up to this size
before = kib()
blocks = [(b"x" * (8 << 20), b"x" * 100_000) for _ in range(32)]
held = [small for _, small in blocks]
del blocks
print((kib() - before) >> 10)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 32, "MiB of 256 are still there"
