"""The screens of ``rrl top`` equal stored pictures, on a small terminal.

``RRL_SNAPSHOTS=write pytest tests/unit/cli/run/top/test_pictures.py`` writes these pictures and docs/top.svg.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from rrl.core.run_dir import RunDir
from rrl.core.types import GpuUse, NodeName
from rrl.manager.model import events as ev
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.text_snapshots import FOLDER, equals_file
from rrl.tests.support.cli.top import Top, allowing, managed, running

DOCS = Path(__file__).parents[5] / "docs"


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fix the settings on which a picture depends: the time zone, and the user's theme and colours."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    for name in ("NO_COLOR", "TEXTUAL_THEME", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "rrl-runs"


def with_gpus(story: Story) -> Story:
    use = {NodeName("n3"): GpuUse(4, 0.93, 61 * 2**30, 80 * 2**30), NodeName("n4"): GpuUse(4, 0.9, 2**36, 80 * 2**30)}
    story.clocks("rollout/1", done=9000, generate=36, wait_weights=4)
    return story.record(ev.GpuUseRecorded(use)).wait(2)


def written(story: Story, root: Path) -> RunDir:
    run = managed(story.written(root))
    # runs that were submitted within one clock tick would have no order
    submitted_at = time.time() - sum(run.id.encode())
    os.utime(run.resolved, (submitted_at, submitted_at))
    lines = [f"2027-01-15T08:00:{second:02}.250000Z batch {second - 7}: 64 answers\n" for second in range(8, 48)]
    (run.logs / f"{run.id}.rollout-1.1.log").write_text("".join(lines))
    return run


async def run(top: Top) -> None:
    await top.shows("trajectories/0", "Restart", "Quit")


async def replica(top: Top) -> None:
    await run(top)
    await top.press("down", "down", "down", "down", "enter")
    await top.shows("rollout/1  #1", "batch 40")


@pytest.mark.parametrize("scene", [run, replica], ids=["run", "replica"])
async def test_screen_equals_its_picture(root: Path, scene: Callable[[Top], Awaitable[None]]) -> None:
    story = with_gpus(allowing())
    opened = written(story, root)

    async with running(story.now, (80, 24), opened) as top:
        await scene(top)
        equals_file(FOLDER / f"top_{scene.__name__}_80.svg", await top.settled_picture())


async def test_picture_of_the_docs_is_that_of_the_program(root: Path) -> None:
    story = with_gpus(allowing())
    opened = written(story, root)

    async with running(story.now, (96, 24), opened) as top:
        await run(top)
        picture = await top.settled_picture()
        assert "http" not in picture.replace("http://www.w3.org/", "").replace("https://www.textualize.io", "")
        equals_file(DOCS / "top.svg", picture)
