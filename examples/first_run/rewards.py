"""Two rewards of an answer to "Describe X in one short sentence.": one short sentence, and about X."""

from __future__ import annotations

from typing import Any

SHORT_WORDS = 10


def short(answer: str, row: dict[str, Any]) -> float:
    """Return 1 for one whole sentence of at most ``SHORT_WORDS`` words, less the longer it is, 0 for anything else."""
    text = answer.strip()
    if not text.endswith(".") or any(sign in text[:-1] for sign in ".!?\n"):
        return 0.0
    return min(1.0, SHORT_WORDS / len(text.split()))


def topical(answer: str, row: dict[str, Any]) -> float:
    """Return 1 if the answer names the thing."""
    return float(row["thing"] in answer.lower())
