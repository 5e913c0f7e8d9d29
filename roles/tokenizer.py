"""A vocabulary that is written down in job.toml: text to tokens and back. Generic; nothing is learnt or downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PAD = 0
EOS = 1
_SPECIAL = 2
"""ids below it are no text"""


class Tokenizer:
    """``[model.tokenizer]``: ``pieces`` (the characters of a string, or strings), ``join`` (put between pieces when
    tokens become text), ``ignore`` (characters of a text that are dropped). Ids: 0 pad, 1 end of sequence, then the
    pieces in order. Raises ValueError for a vocabulary that cannot work."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._pieces = tuple(spec["pieces"])
        self._join = str(spec.get("join", ""))
        self._ignore = str(spec.get("ignore", ""))
        self._ids = {piece: _SPECIAL + i for i, piece in enumerate(self._pieces)}
        if len(self._ids) < len(self._pieces):
            twice = next(piece for i, piece in enumerate(self._pieces) if piece in self._pieces[:i])
            raise ValueError(f"[model.tokenizer] pieces has {twice!r} twice")
        for piece in self._pieces:
            if not piece or any(character in self._ignore for character in piece):
                raise ValueError(f"[model.tokenizer] piece {piece!r} can never match: it is empty, or ignore drops it")
        self._dropped = str.maketrans("", "", self._ignore)
        self._longest = max(map(len, self._pieces), default=0)

    @property
    def size(self) -> int:
        """Ids in all, pad and end of sequence included."""
        return _SPECIAL + len(self._pieces)

    def encode(self, text: str) -> tuple[int, ...]:
        """Longest piece first, from the left. Raises ValueError for what no piece begins."""
        text = text.translate(self._dropped)
        tokens: list[int] = []
        at = 0
        while at < len(text):
            for length in range(min(self._longest, len(text) - at), 0, -1):
                if (token := self._ids.get(text[at : at + length])) is not None:
                    tokens.append(token)
                    at += length
                    break
            else:
                raise ValueError(
                    f"no piece of [model.tokenizer] begins {text[at : at + 10]!r} in {text[:100]!r}:"
                    f" add {text[at]!r} to pieces or to ignore"
                )
        return tuple(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text up to the end of the sequence, without padding. Raises IndexError for an id beyond the vocabulary."""
        pieces: list[str] = []
        for token in tokens:
            if token == EOS:
                break
            if token != PAD:
                pieces.append(self._pieces[token - _SPECIAL])
        return self._join.join(pieces)
