"""A whole run in which two agents of each episode have opposite rewards, and the same model plays both.

In an episode the agent ``high`` answers to ``>``, and then ``low`` to ``<`` in the same conversation. The reward of
``high`` is the share of a digit in its answer, and that of ``low`` is the share of all else in its own. So each agent
must be trained with its own reward and against the other episodes' rewards of the same agent. The vocabulary is so
small that untrained answers miss both bars: their share of the digit is 0.12 and 0.18.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path

from rrl.core.types import Outcome
from rrl.tests.support.runs import check_sound, submit_here

STEPS = 200
LAST_STEPS = 10
"""Number of last steps over which the shares are averaged."""
RUN_TIMEOUT_S = 3600.0
AGENT = """
import openai

CLIENT = openai.AsyncOpenAI(base_url="http://unset", api_key="unset")
DIGIT = "7"


async def run(item, base_url, api_key):
    client, messages, shares = CLIENT.with_options(base_url=base_url, api_key=api_key), [], {}
    for agent, prompt in (("high", ">"), ("low", "<")):
        messages.append({"role": "user", "content": prompt})
        reply = await client.chat.completions.create(model=agent, messages=messages)
        messages.append(reply.choices[0].message)
        answer = messages[-1].content or ""
        shares[agent] = answer.count(DIGIT) / max(1, len(answer))
    return {"high": shares["high"], "low": 1.0 - shares["low"]}


class Games:
    def __init__(self, seed):
        pass

    def prompt(self, i):
        return str(i)

    def answer(self, i):
        return DIGIT

    def score(self, i, answer):  # not called: the agent returns the rewards
        return 0.0, 0.0
"""
JOB = """
[run]
name = "by-name"
steps = {steps}
seed = 0

[cluster]
kind = "local"
node = {{ cpus = 4, mem = "6GiB" }}

[task]
function = "by_name:Games"

[model]
hidden_size = 64
layers = 2
tokenizer = {{ pieces = "7<>", chat = {{ user = "{{content}}" }} }}

[sampling]
prompts_per_step = {prompts}
group_size = 8
max_new_tokens = 4
ahead = 1

[roles.agents]
function = "by_name:run"
concurrency = 48

[roles.trainer]
entropy = 0.0
learning_rate = 0.003
exclusive = false
warm = false

[roles.rollout]
lease = 64
segment_tokens = 4
exclusive = false
"""


def measure(folder: Path, steps: int = STEPS, prompts: int = 4) -> dict[str, float]:
    """Run the job in an empty folder. Return the share of the digit in the answers of each agent in the last steps."""
    rows = run_steps(folder, steps, prompts)[-LAST_STEPS:]
    return {
        "by_name_high": statistics.mean(row["reward_high"] for row in rows),
        "by_name_low": 1.0 - statistics.mean(row["reward_low"] for row in rows),
    }


def run_steps(folder: Path, steps: int, prompts: int) -> list[dict[str, float]]:
    """Run the job in an empty folder, and return the metrics of its steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "by_name.py").write_text(AGENT)
    run = submit_here(folder, JOB.format(steps=steps, prompts=prompts))
    state = run.wait_end(RUN_TIMEOUT_S)
    assert (state.outcome, state.step) == (Outcome.COMPLETED, steps), f"{state.outcome} at {state.step}: {state.why}"
    run.wait_gone()
    check_sound(run.run)
    printed = run.call("metrics", run.run.id, stdout=subprocess.PIPE).communicate(timeout=60)[0]
    return [row["metrics"] for row in map(json.loads, printed.splitlines()) if row["step"]]
