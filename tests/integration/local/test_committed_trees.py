"""A gang of the user's own commits trees: what dies in the middle leaves no half checkpoint, and no file forever."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rrl.core.run_dir import attempt_of
from rrl.core.types import ReplicaId
from rrl.roles.checkpoints.folders import LINKS
from rrl.roles.trajectories.durable.log import read_commits
from rrl.tests.support.light_roles.tree_trainer import ALL_DIE_AT, DIES_AT
from rrl.tests.support.listening_manager import wait_until
from rrl.tests.support.runs import TestRun, all_work, check_sound, light_job, submit_here

STEPS = 6
OFTEN = '[recovery]\nbackoff = "100ms"\nfull_restarts = 0\n'
"""Two deaths in one step would otherwise restart the whole run, after a minute."""
TRAINER, STORE = ReplicaId("trainer/0"), ReplicaId("trajectories/0")
NAMES = {f"rank-{rank}/deep/{name}" for rank in range(2) for name in ("state", "more")}


def test_rank_killed_in_its_part_and_gang_and_store_before_the_links_are_used_and_all_ranks_before_they_publish(
    tmp_path: Path,
) -> None:
    toml = light_job("local", STEPS, rollouts=1, spares=0, warm=False, one_node=True, extra=OFTEN)
    toml = toml.replace("light_trainer.py", "tree_trainer.py").replace(
        "[roles.trainer]\n", "[roles.trainer]\nranks = 2\n"
    )
    run = submit_here(tmp_path, toml)
    links = _linked(run, 2)  # rank 1 of the first incarnation has died in its part of a step
    commits = read_commits(run.run.store)
    assert max(commits) == DIES_AT - 1
    assert links == run.run.path / commits[DIES_AT - 1].manifest["folder"] / LINKS
    assert {path.relative_to(links).as_posix() for path in links.rglob("*") if path.is_file()} == NAMES
    before = run.wait(lambda state: all_work(state) and state.replicas[TRAINER].incarnation_number == 2)
    for victim in (STORE, TRAINER):
        pid = before.replicas[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    assert _linked(run, 3) == links
    (run.run.path / "go.4").touch()  # for the gang after the one that dies between a commit and its publication
    (run.run.path / "go.3").touch()
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    assert _linked(run, 4) == run.run.path / read_commits(run.run.store)[ALL_DIE_AT].manifest["folder"] / LINKS
    commits = read_commits(run.run.store)
    assert {step: commit.incarnation.number for step, commit in commits.items()} == {1: 1, 2: 1, 3: 3, 4: 3, 5: 4, 6: 4}
    assert all(commit.manifest["files"].keys() == NAMES for commit in commits.values())
    kept = sorted(attempt for folder in run.run.checkpoints.iterdir() if (attempt := attempt_of(folder.name)))
    assert [attempt.step for attempt in kept] == [STEPS - 1, STEPS], "a half checkpoint or one of links is left"


def _linked(run: TestRun, incarnation: int) -> Path:
    """Return the folder of the commit once rank 0 of this incarnation has got it."""
    file = run.run.path / f"linked.{incarnation}"
    wait_until(lambda: file.exists() and file.read_text() != "")
    return Path(file.read_text())
