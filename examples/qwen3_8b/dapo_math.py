"""Competition mathematics with whole numbers as answers, scored by rule: DAPO-Math-17k (arXiv:2503.14476).

Any file of JSON lines in the form of DAPO-Math-17k works, and the task needs only Python. To write the file of
DAPO-Math-17k once, on a machine with Hugging Face's `datasets`:

    from datasets import load_dataset
    load_dataset("BytedTsinghua-SIA/DAPO-Math-17k", split="train").to_json("dapo-math-17k.jsonl")

Each prompt of DAPO-Math-17k asks for a last line "Answer: ...". An answer is right if the text after its last "Answer:"
is the right number.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

_ANSWER = re.compile(r"Answer:\s*([^\n]*)", re.IGNORECASE)


class DapoMath:
    def __init__(self, rows: list[tuple[str, str]]) -> None:
        self._rows = rows

    def prompt(self, i: int) -> str:
        return self._rows[i % len(self._rows)][0]

    def answer(self, i: int) -> str:
        return f"Answer: {self._rows[i % len(self._rows)][1]}"

    def score(self, i: int, answer: str) -> tuple[float, float]:
        match = _ANSWER.findall(answer)
        right = bool(match) and _plain(match[-1]) == _plain(self._rows[i % len(self._rows)][1])
        return float(right), float(right)


def make(seed: int, file: str) -> DapoMath:
    """Return the task of ``file``; ``seed`` determines the order of its items.

    The store and the reward role must be able to read ``file``.
    """
    rows: dict[str, tuple[str, str]] = {}  # the published file has each problem a hundred times
    with Path(file).expanduser().open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            prompt = row["prompt"][-1]["content"]
            rows.setdefault(prompt, (prompt, str(row["reward_model"]["ground_truth"])))
    ordered = sorted(rows.values())
    random.Random(seed).shuffle(ordered)
    return DapoMath(ordered)


def _plain(text: str) -> str:
    """Return a number without the marks around and in it: "$\\boxed{1,234}$." is 1234."""
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text.strip())
    text = re.sub(r"[$,\s*]|\\[()\[\]]", "", text).rstrip(".")
    number = re.fullmatch(r"([+-]?)0*([0-9]+)", text)  # no int(), which converts 4300 digits at most
    if number is None:
        return text
    sign, digits = number.groups()
    return f"-{digits}" if sign == "-" and digits != "0" else digits
