"""The store keeps samples of each committed step, whatever happens to its process and its disk."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from rrl.core.run_spec import RunSpec, SamplesSpec, TrainerSettings
from rrl.core.sample_texts import DecodedSample, decoded
from rrl.core.samples_file import StepSamples, files_in, read_steps
from rrl.roles.trajectories.sample_writer import SampleWriter
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Done, Score, Scoring
from rrl.tests.support.fake_disk import Died, FakeDisk
from rrl.tests.support.manager.jobs import job
from rrl.tests.support.roles.trajectories.agents import CREW, episodes, finish, open_agents_store, turn
from rrl.tests.support.roles.trajectories.crew import (
    BATCH,
    GROUP,
    REWARD,
    ROLLOUT,
    bind,
    commit,
    generate,
    lease,
    open_store,
    segment,
)
from rrl.tests.support.roles.trajectories.crew import prompt as prompt_of

ALL = 4096
LIMIT = 2**20


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncs, which the files of samples do not have."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


def spec(per_step: int = ALL, limit: int = LIMIT, built_in: bool = True, **trainer: Any) -> RunSpec:
    made = job()
    roles = tuple(msgspec.structs.replace(role, built_in=built_in) for role in made.roles)
    settings = TrainerSettings(**trainer)
    return msgspec.structs.replace(made, roles=roles, trainer=settings, samples=SamplesSpec(per_step, limit), seed=7)


def opened(root: Path, made: RunSpec | None = None, **changed: Any) -> Store:
    return open_store(root / "store", samples=SampleWriter(root / "samples", made or spec()), **changed)


def scored(store: Store, rewards: Sequence[float], part: str = "format") -> None:
    answer = store.lease_scoring(REWARD, len(rewards))
    assert isinstance(answer, Scoring)
    scores = [
        Score(item.trajectory, reward, reward / 2, {part: reward / 4})
        for item, reward in zip(answer.items, rewards, strict=True)
    ]
    assert store.post_scores(REWARD, scores) == Done()


def trained(store: Store, number: int, rewards: list[float] | None = None, part: str = "format") -> None:
    generate(store, at_most=BATCH * GROUP, weights=max(0, number - 2))
    scored(store, rewards or [float(one) for one in range(BATCH * GROUP)], part)
    commit(store, bind(store, number))


def step(root: Path, number: int) -> StepSamples:
    _, [found] = read_steps(root / "samples", lambda _: [number])
    return found


def shown(root: Path, number: int) -> list[DecodedSample]:
    return decoded(step(root, number), None)


def kept_in(root: Path) -> list[int]:
    """Return the steps that have samples."""
    return read_steps(root / "samples", lambda _: [])[0]


def test_samples_of_a_committed_step_have_all_that_people_ask_for(tmp_path: Path) -> None:
    store = opened(tmp_path)
    trained(store, 1)
    trained(store, 2)
    first, second, third, _ = shown(tmp_path, 2)
    assert (first.trajectory, first.group, first.item) == (4, 2, 20)
    assert [one.tokens for one in first.turns] == [prompt_of(2).tokens, (5, 1)]
    assert [(one.sampled, one.trained) for one in first.turns] == [(False, False), (True, True)]
    assert (second.reward, second.training_reward, second.parts) == (1.0, 0.5, {"format": 0.25})
    assert (first.age, first.versions, first.truncated) == (1, (0,), False)
    assert third.group == 3
    assert step(tmp_path, 2).trajectories == BATCH * GROUP


def test_advantage_is_that_of_the_built_in_trainer(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from rrl.roles.trainer.losses import group_advantages

    trained(opened(tmp_path, spec(advantage_floor=0.05)), 1, [0.0, 1.0, 3.0, 7.0])
    found = shown(tmp_path, 1)
    groups = torch.tensor([one.group for one in found])
    expected = group_advantages(torch.tensor([one.training_reward for one in found]), groups, 0.05)
    assert [one.advantage for one in found] == pytest.approx(expected.tolist(), abs=1e-6)


def test_answers_that_were_cut_are_marked_and_have_no_advantage_if_the_trainer_leaves_them_out(tmp_path: Path) -> None:
    for truncated, advantages in (("drop", [None, 0.0]), ("train", [-2.0, 2.0])):
        folder = tmp_path / truncated
        folder.mkdir()
        store = opened(folder, spec(advantage_std=False, truncated=truncated), end_tokens={1})
        [one, other, *_] = lease(store, at_most=BATCH * GROUP)
        store.append(ROLLOUT, [segment(one.trajectory, 0, (5, 5, 5, 5))], [one.trajectory])
        trained(store, 1, [0.0, 8.0, 1.0, 2.0])
        found = shown(folder, 1)
        assert [each.truncated for each in found] == [True, False, False, False]
        assert [each.advantage for each in found][:2] == advantages
        assert found[1].trajectory == other.trajectory


def test_trainer_of_the_users_own_has_no_known_advantage(tmp_path: Path) -> None:
    trained(opened(tmp_path, spec(built_in=False)), 1)
    assert {one.advantage for one in shown(tmp_path, 1)} == {None}


def test_the_best_the_worst_and_random_trajectories_are_kept_the_same_in_every_process(tmp_path: Path) -> None:
    rewards = Random(1).sample(range(40), 40)
    kept = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        store = opened(folder, spec(8), groups_per_batch=20)
        generate(store, at_most=40)
        scored(store, rewards)
        commit(store, bind(store, 1))
        kept.append([one.trajectory for one in shown(folder, 1)])
    assert kept[0] == kept[1]
    assert len(kept[0]) == 8
    ranked = sorted(range(40), key=rewards.__getitem__)
    assert {*ranked[:2], *ranked[-2:]} < set(kept[0])


def test_an_episode_is_kept_with_its_whole_conversation(tmp_path: Path) -> None:
    store = open_agents_store(tmp_path / "store", CREW, samples=SampleWriter(tmp_path / "samples", spec()))
    for item in episodes(store, 4):
        one = turn(store, item, (2, 3), (5, 6))
        turn(store, item, (7,), (8, 1), one, 4)
        finish(store, item)
    commit(store, bind(store, 1))
    first, *_ = shown(tmp_path, 1)
    assert [(one.sampled, one.tokens) for one in first.turns] == [
        (False, (2, 3)),
        (True, (5, 6)),
        (False, (7,)),
        (True, (8, 1)),
    ]


def test_steps_of_one_commit_all_have_samples(tmp_path: Path) -> None:
    store = opened(tmp_path, checkpoint_every=4)
    batches = []
    for number in range(1, 5):
        generate(store, at_most=BATCH * GROUP)
        scored(store, [1.0] * BATCH * GROUP)
        batches.append(bind(store, number))
    assert kept_in(tmp_path) == [], "samples of a step that is not committed"
    commit(store, batches[-1], earlier=batches[:-1])
    assert kept_in(tmp_path) == [1, 2, 3, 4]


# ── deaths and full disks ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_store_that_dies_between_a_commit_and_its_samples_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    trained(store, 1)

    def die(*_: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(SampleWriter, "_append", die)
        with pytest.raises(Died):
            trained(store, 2)
    assert kept_in(tmp_path) == [1]
    store.close()
    store = opened(tmp_path)
    store.flush()
    assert kept_in(tmp_path) == [1, 2]
    trained(store, 3)
    assert kept_in(tmp_path) == [1, 2, 3]
    assert len(shown(tmp_path, 2)) == BATCH * GROUP


def test_a_kill_at_any_call_leaves_readable_samples_and_costs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "samples").mkdir()
    with monkeypatch.context() as patch:
        disk = FakeDisk(tmp_path / "samples", patch)
        store = opened(tmp_path)
        for number in (1, 2, 3):
            disk.note = number
            trained(store, number)
    (tmp_path / "crashed").mkdir()
    count = 0
    for moment, _, folder in disk.crash_folders(tmp_path / "crashed", lambda start, end: range(start, end, 29)):
        now = [one for one in moment.now if one != "thinned"]
        _, found = read_steps(folder, lambda steps: steps)
        assert all(len(one.samples) == BATCH * GROUP for one in found)
        if folder_is_a_kill(folder, moment.now) and now:
            assert [one.step for one in found][: moment.note - 1] == list(range(1, moment.note))
        SampleWriter(folder, spec())
        count += 1
    assert count > 20


def folder_is_a_kill(folder: Path, now: dict[str, bytes]) -> bool:
    """Return whether a folder has what a killed process left, not what a power cut left."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} == now


def test_a_full_disk_costs_samples_only_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples").mkdir()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "rrl.trajectories"):
        disk = FakeDisk(tmp_path / "samples", patch)
        store = opened(tmp_path)
        trained(store, 1)
        disk.full = True
        trained(store, 2)
        trained(store, 3)
        disk.full = False
        trained(store, 4)
    assert kept_in(tmp_path) == [1, 4]
    assert len(read_steps(tmp_path / "samples", lambda steps: steps)[1]) == 2
    [record] = [one for one in caplog.records if "samples" in one.getMessage()]
    assert os.strerror(errno.ENOSPC) in record.getMessage()


def test_an_error_that_nobody_foresaw_costs_samples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "rrl.trajectories"):
        patch.setattr(SampleWriter, "_append", lambda *_: 1 // 0)
        trained(store, 1)
        trained(store, 2)
    trained(store, 3)
    assert kept_in(tmp_path) == [3]
    assert [one.getMessage() for one in caplog.records if "samples" in one.getMessage()] == [
        "samples of steps are not kept: integer division or modulo by zero; the run goes on"
    ]


# ── the limit ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_old_steps_are_thinned_out_evenly_below_the_limit(tmp_path: Path) -> None:
    store, size, sizes = opened(tmp_path, spec(limit=16_000)), 0, []
    for number in range(1, 161):
        trained(store, number)
        size = sum(path.stat().st_size for path in (tmp_path / "samples").iterdir())
        sizes.append(size)
        if number % 50 == 0:
            store.close()
            store = opened(tmp_path, spec(limit=16_000))
    kept = kept_in(tmp_path)
    assert max(sizes) <= 16_000
    assert size > 8_000
    assert kept[-1] == 160
    gaps = [after - before for before, after in zip([0, *kept], kept, strict=False)]
    assert max(gaps) <= 8
    assert gaps == sorted(gaps, reverse=True) or len(set(gaps)) <= 3


def test_a_step_larger_than_the_limit_is_not_kept_and_the_others_are(tmp_path: Path) -> None:
    store = opened(tmp_path, spec(limit=1500))
    trained(store, 1)
    trained(store, 2, part="x" * 1500)
    trained(store, 3)
    assert kept_in(tmp_path) == [1, 3]
    assert {one.stride for one in files_in(tmp_path / "samples")} == {1}
