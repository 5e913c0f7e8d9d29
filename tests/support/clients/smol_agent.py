"""The ToolCallingAgent of smolagents, which forces a tool call in every turn."""

from __future__ import annotations

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool

from rrl.tests.support.clients import house

model = OpenAIModel("policy", os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[tool(house.look)], model=model, max_steps=10)
house.report(str(agent.run(house.TASK)))
