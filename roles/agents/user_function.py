"""The user's agent: the async function that ``[roles.agents] function`` names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ..models.tasks import FunctionMissing, TaskError, import_function

Agent = Callable[[str, str, str], Awaitable[Any]]
"""Runs one episode. Takes the text of the task's item, a base URL and an API key, and returns the reward or None."""
_SIGNATURE = "async def run(item, base_url, api_key)"


class AgentError(TaskError):
    """``[roles.agents] function`` is invalid.

    Args:
        problem: What is wrong, and what would be right.
        missing_package: A package that the agent needs and this Python does not have; empty if that is not the problem.
    """

    def __init__(self, problem: str, missing_package: str = "") -> None:
        super().__init__("function", problem, missing_package, "roles.agents")


def load_agent(name: str, folder: Path) -> Agent:
    """Import the agent ``module:function``. An exception that the user's module raises is not caught.

    Args:
        name: Module and function.
        folder: Folder of job.toml, from which the module is imported.

    Raises:
        AgentError: The function cannot be imported, is not async, or does not take the three arguments.
    """
    try:
        function = import_function(name, folder)
    except FunctionMissing as error:
        raise AgentError(error.problem, error.missing_package) from error.__cause__
    if not inspect.iscoroutinefunction(function):
        raise AgentError(f"{json.dumps(name)} is not async; write {_SIGNATURE}")
    try:
        inspect.signature(function).bind("item", "base_url", "api_key")
    except TypeError as error:
        problem = f"{json.dumps(name)} cannot be called with item, base_url and api_key: {error}"
        raise AgentError(f"{problem}; write {_SIGNATURE}") from None
    return function
