"""A third-party agent: the CodeAgent of smolagents, unchanged. It answers by Python code that the model writes.

The code runs in smolagents' own interpreter, which allows few imports and no files, but is not a sandbox. A real job
should use one of smolagents' sandboxes (``executor_type``).
"""

import asyncio
import random

from smolagents import CodeAgent, OpenAIModel

MAX_STEPS = 2


async def run(item, base_url, api_key):
    """Let the agent add two numbers; the reward is 1 for the right sum. The agent blocks, so it runs in a thread."""
    answer = await asyncio.to_thread(play, item, base_url, api_key)
    return float(str(answer).strip() == Sums.solution(item))


def play(item, base_url, api_key):
    """Return the agent's answer, or its best guess if it has no answer after :data:`MAX_STEPS` steps."""
    model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = CodeAgent(tools=[], model=model, max_steps=MAX_STEPS, verbosity_level=0)
    return agent.run(f"How much is {item}?")


class Sums:
    """The task: item i is a sum of two digits."""

    def __init__(self, seed):
        self.seed = seed

    def prompt(self, i):
        chance = random.Random(f"{self.seed} {i}")
        return f"{chance.randrange(10)} + {chance.randrange(10)}"

    @staticmethod
    def solution(item):
        return str(sum(int(number) for number in item.split(" + ")))

    def answer(self, i):
        return self.solution(self.prompt(i))

    def score(self, i, answer):  # not called: the agent returns the reward
        right = float(answer == self.answer(i))
        return right, right
