"""Prompts of several files and several rewards in the store: their figures, also after a restart of the store."""

from __future__ import annotations

from pathlib import Path

from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.roles.models.tasks import load_task
from rrl.roles.models.tokenizer import open_tokenizer
from rrl.roles.reward import Scorer
from rrl.roles.trajectories import server
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Done, Scoring
from rrl.tests.support.roles.trajectories import crew

REWARDS = """
def right(answer, row):
    return float(answer == row["answer"])

def level(answer, row):
    return row["level"], -row["level"]
"""
LEVELS = {"low": 0.25, "high": 0.75}
FIGURES = {
    "reward": 1 + 0.5 * 0.5,
    "training_reward": 1 - 0.5 * 0.5,
    "reward_right": 1.0,
    "reward_level": 0.5,
    "reward_source_low": 1.125,
    "reward_source_high": 1.375,
}


def test_a_restarted_store_continues_the_mix_and_rewards_are_reported_by_file_and_by_name(tmp_path: Path) -> None:
    for name, level in LEVELS.items():
        rows = (f'{{"question": "{i}", "answer": "7", "level": {level}}}\n' for i in range(5))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    (tmp_path / "source_rewards.py").write_text(REWARDS)
    files = [{"path": str(tmp_path / f"{name}.jsonl"), "name": name} for name in LEVELS]
    terms = {
        "right": {"function": "source_rewards:right"},
        "level": {"function": "source_rewards:level", "weight": 0.5},
    }
    table = {
        "run": {"name": "test", "steps": 9},
        "model": {"tokenizer": {"pieces": "0123456789"}},
        "task": {"files": files, "rewards": terms},
    }
    job = resolve(Job.model_validate(table), "python")
    tokenizer = open_tokenizer(job.model)

    def opened() -> tuple[Store, Scorer]:
        prompts, _ = server._prompts_and_evaluations(job, tokenizer, tmp_path)
        scorer = Scorer(load_task(job.task, job.seed, tokenizer, tmp_path), tokenizer, tmp_path)
        return crew.open_store(tmp_path / "store", next_prompt=prompts, groups_per_batch=2), scorer

    store, scorer = opened()
    for step in range(1, 9):
        crew.generate(store, at_most=2 * crew.GROUP, tokens=(*tokenizer.encode("7"), 1))
        if step % 2:  # killed between the answers and their scores
            store.close()
            store, scorer = opened()
        work = store.lease_scoring(crew.REWARD, 100)
        assert isinstance(work, Scoring)
        scored = scorer.score(work.items)
        assert scored.failed == {}
        assert store.post_scores(crew.REWARD, scored.scores) == Done()
        store.flush()
        if not step % 2:  # and between the scores and the step
            store.close()
            store, scorer = opened()
        done = crew.commit(store, crew.bind(store, step))
        assert {name: done.metrics[name] for name in FIGURES} == FIGURES
