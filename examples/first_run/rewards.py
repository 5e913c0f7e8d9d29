"""Two rewards of an answer to "Describe X": it should be one short sentence, and speak of X."""

from __future__ import annotations

from typing import Any

MOST_WORDS = 12


def short(answer: str, row: dict[str, Any]) -> float:
    """Return 1 for one sentence of at most ``MOST_WORDS`` words; half of it for the sentence alone."""
    text = answer.strip()
    if not text.endswith(".") or any(sign in text[:-1] for sign in ".!?\n"):
        return 0.0
    return 1.0 if len(text.split()) <= MOST_WORDS else 0.5


def topical(answer: str, row: dict[str, Any]) -> float:
    """Return 1 if the answer names what the row asks for."""
    return float(row["thing"] in answer.lower())
