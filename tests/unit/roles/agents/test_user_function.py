from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.roles.agents.user_function import load_agent
from rrl.roles.models.tasks import TaskError

MODULE = """
async def run(item, base_url, api_key):
    return item

def blocking(item, base_url, api_key):
    pass

async def two(item, base_url):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "agent_of_test.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("agent_of_test", None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def test_an_async_function_of_the_jobs_folder_is_loaded(folder: Path) -> None:
    agent = load_agent("agent_of_test:run", folder)

    async def call() -> object:
        return await agent("item", "url", "key")

    assert asyncio.run(call()) == "item"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("agent_of_test:blocking", "is not async; write async def run"),
        ("agent_of_test:two", "cannot be called with item, base_url and api_key"),
        ("agent_of_test:rum", 'has no function rum; did you mean "run"?'),
        ("no_such_agent:run", "there is no module no_such_agent"),
    ],
)
def test_unusable_agent_function_is_refused_with_the_reason(folder: Path, name: str, problem: str) -> None:
    with pytest.raises(TaskError, match=r"^\[roles\.agents\] function: ") as raised:
        load_agent(name, folder)
    assert problem in raised.value.problem
