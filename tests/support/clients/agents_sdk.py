"""The OpenAI Agents SDK with its defaults: plain, streamed, with an output type, and with a forced tool."""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, ModelSettings, Runner, function_tool
from pydantic import BaseModel

from rrl.tests.support.clients import house


class House(BaseModel):
    """The report in the mode ``typed``."""

    chairs: int


mode = sys.argv[1]
agent = Agent(
    name="walker",
    instructions=house.SYSTEM,
    model="policy",
    tools=[function_tool(house.look)],
    output_type=House if mode == "typed" else None,
    model_settings=ModelSettings(tool_choice="required") if mode == "required" else ModelSettings(),
)


async def main() -> str:
    if mode == "streamed":
        result = Runner.run_streamed(agent, house.TASK)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, house.TASK)
    return str(result.final_output)


house.report(asyncio.run(main()))
