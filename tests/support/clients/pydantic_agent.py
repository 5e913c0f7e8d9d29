"""pydantic-ai: an agent with a text or a typed output, over chat completions, responses or messages."""

from __future__ import annotations

import sys

from pydantic import BaseModel
from pydantic_ai import Agent

from rrl.tests.support.clients import house


class House(BaseModel):
    """The report in the mode ``typed``."""

    chairs: int


provider, mode = sys.argv[1:]  # provider: openai-chat, openai (responses), anthropic
agent = Agent(
    f"{provider}:policy", instructions=house.SYSTEM, tools=[house.look], output_type=House if mode == "typed" else str
)
house.report(str(agent.run_sync(house.TASK).output))
