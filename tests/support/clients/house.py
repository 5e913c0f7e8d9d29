"""The episode that every client plays: a house with five floors, a tool that looks into one, and a report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

FLOORS = tuple(f"floor {number}" for number in range(1, 6))
TASK = "Look into floor 1 to floor 5, one after the other, and then report how many chairs there are."
MODEL = os.environ.get("HOUSE_MODEL", "policy")
SYSTEM = "You walk through a house."
REPORT = "There are 60 chairs."
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"floor": {"type": "string"}},
    "required": ["floor"],
    "additionalProperties": False,
}
"""JSON schema of the arguments of :func:`look`."""
looked: list[str] = []


def look(floor: str) -> str:
    """Look into a floor.

    Args:
        floor: The name of the floor.
    """
    looked.append(floor)
    return f"{floor} has 12 chairs."


def report(answer: str) -> None:
    """Print the reward of the episode: 1 if each floor was looked into once, in order, and the report is right."""
    print(f"{looked} {answer!r}", file=sys.stderr)
    print(float(tuple(looked) == FLOORS and "60" in answer))


def until_whole(call: Callable[[], Any], *broken: type[Exception]) -> Any:
    """Return the result of a call that is repeated while it breaks, as programs repeat what their client does not."""
    for _ in range(9):
        try:
            return call()
        except broken as error:
            print(f"again after {error!r}", file=sys.stderr)
            time.sleep(0.3)
    return call()
