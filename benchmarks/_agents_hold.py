"""An agent that makes no call: it gives the key of its episode to the benchmark, which makes the calls itself."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path

from msgspec import Struct

FOLDER_ENV = "RRL_BENCH_EPISODES"
"""Environment variable that names the folder into which each agent writes the key of its episode."""
_POLL_S = 0.5


class HeldEpisode(Struct, frozen=True):
    """An episode of which the benchmark has the key."""

    base_url: str
    api_key: str


async def run(item: str, base_url: str, api_key: str) -> float:
    """Write the key to the folder, and wait until the benchmark writes a file ``end`` there."""
    folder = Path(os.environ[FOLDER_ENV])
    name = folder / hashlib.sha256(api_key.encode()).hexdigest()
    name.with_suffix(".new").write_text(json.dumps({"base_url": base_url, "api_key": api_key}))
    name.with_suffix(".new").rename(name.with_suffix(".json"))
    while not (folder / "end").exists():
        await asyncio.sleep(_POLL_S)
    return 0.0


class Items:
    """A task whose item ``i`` is the number ``i``; every answer has the same score."""

    def prompt(self, i: int) -> str:
        """Return the prompt of item ``i``."""
        return str(i)

    def answer(self, i: int) -> str:
        """Return the answer of item ``i``."""
        return str(i)

    def score(self, i: int, answer: str) -> tuple[float, float]:
        """Return the reward that is reported, and the reward that is trained on."""
        return 0.0, 0.0


def make(seed: int) -> Items:
    """Return the task of a run (``[task] function``)."""
    return Items()
