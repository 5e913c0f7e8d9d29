"""The user's agent: the async function that ``[roles.agents] function`` names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ..models.tasks import TaskError, import_function

Agent = Callable[[str, str, str], Awaitable[Any]]
"""Runs one episode. Takes the text of the task's item, a base URL and an API key, and returns the reward, rewards by
name, or None."""
_TABLE = "roles.agents"
_SIGNATURE = "async def run(item, base_url, api_key)"


def load_agent(name: str, folder: Path) -> Agent:
    """Import the agent ``module:function``. An exception that the user's module raises is not caught.

    Args:
        name: Module and function.
        folder: Folder of job.toml, from which the module is imported.

    Raises:
        TaskError: The function cannot be imported, is not async, or does not take the three arguments.
    """
    function = import_function(name, folder, "function", _TABLE)
    if not inspect.iscoroutinefunction(function):
        raise TaskError("function", f"{json.dumps(name)} is not async; write {_SIGNATURE}", table=_TABLE)
    try:
        inspect.signature(function).bind("item", "base_url", "api_key")
    except TypeError as error:
        problem = f"{json.dumps(name)} cannot be called with item, base_url and api_key: {error}"
        raise TaskError("function", f"{problem}; write {_SIGNATURE}", table=_TABLE) from None
    return function
