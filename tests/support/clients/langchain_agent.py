"""LangChain's ``create_agent`` over chat completions, responses or messages, also streamed and with a typed output."""

from __future__ import annotations

import sys

from langchain.agents import create_agent
from pydantic import BaseModel

from rrl.tests.support.clients import house


class House(BaseModel):
    """The report in the mode ``typed``."""

    chairs: int


form, mode = sys.argv[1:]
if form == "messages":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model="policy", max_tokens=1000, streaming=mode == "streamed")
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy", use_responses_api=form == "responses", streaming=mode == "streamed")
agent = create_agent(
    model, [house.look], system_prompt=house.SYSTEM, response_format=House if mode == "typed" else None
)
result = agent.invoke({"messages": [{"role": "user", "content": house.TASK}]})
house.report(str(result["structured_response"]) if mode == "typed" else str(result["messages"][-1].text))
