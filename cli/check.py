"""``rrl check``: is the job spec right, what does it say with every default, and what would be submitted."""

from __future__ import annotations

from pathlib import Path

from rrl.cli.asking import BadInput
from rrl.cli.screen import print_json
from rrl.manager.submit import preview
from rrl.spec.job import Job
from rrl.spec.load import load_job, resolved
from rrl.spec.write import as_toml


def planned(job: Job, path: Path) -> list[tuple[str, str]]:
    """What would be submitted, as (title, text). Raises BadInput where an option cannot be passed on to Slurm."""
    try:
        return preview(job)
    except ValueError as error:
        raise BadInput(f"{path}: slurm: {error}") from None


def check(path: Path, *, json: bool) -> int:
    """Raises SpecError. Touches nothing."""
    job = load_job(path)
    plan = planned(job, path)
    if json:
        print_json({"job": resolved(job), "plan": [{"title": title, "text": text} for title, text in plan]})
        return 0
    for title, text in [(f"{path}, with every default", as_toml(job)), *plan]:
        print(f"── {title} {'─' * max(0, 96 - len(title))}\n{text.strip()}\n")
    print(f"{path} is right; nothing was submitted")
    return 0
