"""Runs ``rrl top`` without a terminal, sends keys and mouse events to it, and reads its screen."""

from __future__ import annotations

import asyncio
import html
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from textual.pilot import Pilot

from rrl.api.watching.runs_watcher import RunsWatcher
from rrl.cli.run.top.top_app import TopApp
from rrl.core.run_dir import RunDir
from rrl.manager.storage.lease import LeaseHolder
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.cli.waiting import DEADLINE_S

_CELL = re.compile(r'<text (?![^>]*text-anchor)[^>]*x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>')
_FONTS = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono"'
_CELL_WIDTH = 12.2
"""Width of a column in rich's pictures, in units of the SVG."""
SETTLED_PICTURES = 15
"""The picture counts as settled after this number of equal pictures in a row, 0.02 s apart."""
LEASE_AHEAD_S = 25.0
"""Time (s) by which a lease is dated into the future, because nothing renews it. A lease is stale 30 s after its
date."""


class Top:
    """The running application, and Textual's pilot, which sends it keys and mouse events."""

    def __init__(self, app: TopApp, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, condition: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + DEADLINE_S
        while not condition():
            assert loop.time() < end, f"the condition did not become true; the screen:\n{self.text()}"
            await self.pilot.pause(0.02)

    async def shows(self, *texts: str) -> str:
        """Wait until the screen contains all texts, and return the whole screen."""
        await self.until(lambda: all(text in self.text() for text in texts))
        return self.text()

    async def settled_picture(self) -> str:
        """Return the picture once it no longer changes.

        Textual updates focus, footer and scrollbars after the content.
        """
        pictures = [self.picture()]

        def settled() -> bool:
            pictures.append(self.picture())
            return len(pictures) > SETTLED_PICTURES and len(set(pictures[-SETTLED_PICTURES:])) == 1

        await self.until(settled)
        return pictures[-1]

    def picture(self) -> str:
        return without_web_font(self.app.export_screenshot(title="rrl top", simplify=True)).rstrip() + "\n"

    def text(self) -> str:
        """Return the lines of the screen, without the title of the picture above it."""
        lines: dict[float, str] = {}
        for x, y, text in _CELL.findall(self.app.export_screenshot(title="")):
            column, shown = round(float(x) / _CELL_WIDTH), html.unescape(text).replace("\u00a0", " ")
            lines[float(y)] = lines.get(float(y), "").ljust(column) + shown
        return "\n".join(line.rstrip() for _, line in sorted(lines.items()))


@asynccontextmanager
async def running(now: float, size: tuple[int, int] = (80, 24), opened: RunDir | None = None) -> AsyncIterator[Top]:
    """Run the application at the wall clock time ``now`` (s); ``opened`` is the run that it shows first."""
    app = TopApp(RunsWatcher(opened, lambda: now), opened)
    app.animation_level = "none"
    async with app.run_test(size=size, notifications=True) as pilot:
        top = Top(app, pilot)
        yield top


def allowing(run: str = "quick-7") -> Story:
    """Return a run whose job allows faults on demand, and in which a rollout was replaced."""
    return Story(run, msgspec.structs.replace(job_view(), faults_allowed=True)).works().recovers("rollout/0")


def managed(run: RunDir) -> RunDir:
    """Let this process hold the lease of a run, as if it were its manager."""
    holder = LeaseHolder(os.uname().nodename, os.getpid(), 17)
    lease = run.epochs / "000001"
    lease.write_bytes(msgspec.json.encode(holder))
    renewed_at = lease.stat().st_mtime + LEASE_AHEAD_S
    os.utime(lease, (renewed_at, renewed_at))
    return run


def without_web_font(svg: str) -> str:
    """Return a picture by rich or Textual without its web font, so that it loads no file from a server."""
    svg = re.sub(r"\n *@font-face \{.*?\n *\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", f"{_FONTS}, monospace")
