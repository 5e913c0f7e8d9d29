"""An agent that guesses a digit from hints, and its task. It imports nothing of rrl: any OpenAI client works."""

import random

import openai

GUESSES = 3
CLIENT = openai.AsyncOpenAI(base_url="http://unset", api_key="unset")  # all episodes share its connections


async def run(item, base_url, api_key):
    """Play one episode, and return its reward: 1 for the digit at the first guess, 0.1 less for each hint, or 0."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    secret = int(item)
    messages = [{"role": "user", "content": "?"}]
    for guess in range(GUESSES):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        answer = reply.choices[0].message
        if len(answer.content) != 1 or not answer.content.isdigit() or reply.choices[0].finish_reason != "stop":
            return 0.0
        if int(answer.content) == secret:
            return 1.0 - 0.1 * guess
        messages += [answer, {"role": "user", "content": "<" if secret < int(answer.content) else ">"}]
    return 0.0


class Digits:
    """The task: item i is a digit, which the agent knows and the model has to find."""

    def __init__(self, seed):
        self.seed = seed

    def prompt(self, i):
        return str(random.Random(f"{self.seed} {i}").randrange(10))

    def answer(self, i):
        return self.prompt(i)

    def score(self, i, answer):  # not called: the agent returns the reward
        found = float(answer == self.prompt(i))
        return found, found
