"""Text to tokens and back: what the roles need of a tokenizer, how it is opened, and the vocabulary that is written
down in job.toml. That of a Hugging Face folder stands in :mod:`rrl.roles.models.hf_tokenizer`. No torch: the store and
the reward role open it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

PAD = 0
EOS = 1
_SPECIAL = 2
"""ids of a :class:`PieceTokenizer` below it are no text"""


class Tokenizer(Protocol):
    """Its ids are those that the model embeds."""

    @property
    def size(self) -> int:
        """Ids in all, those that are no text included."""
        ...

    @property
    def eos(self) -> int:
        """What ends an answer that is shown to the model (the supervised warm start)."""
        ...

    @property
    def stop_tokens(self) -> frozenset[int]:
        """What ends an answer of the model's; ``eos`` is one of them, and a chat model may have several."""
        ...

    @property
    def pad(self) -> int: ...

    def prompt(self, text: str) -> tuple[int, ...]:
        """What the model is asked with: as its kind wants it, in the chat template where ``[model] chat`` is set.
        Raises ValueError for text that cannot be written in it."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text, nothing added. Raises ValueError for text that cannot be written in it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text up to the first of ``ends``, without what is no text."""
        ...


def open_tokenizer(model: Mapping[str, Any]) -> Tokenizer:
    """That of the resolved ``[model]``: of the folder in ``path``, else ``[model.tokenizer]``. Raises ValueError for
    one that cannot work."""
    if model.get("path") is None:
        return VocabularyTokenizer(model["tokenizer"])
    from .hf_tokenizer import FolderTokenizer  # here: a model that is built locally needs no tokenizers

    return FolderTokenizer(Path(model["path"]), chat=bool(model.get("chat")))


class VocabularyTokenizer:
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

    @property
    def eos(self) -> int:
        return EOS

    @property
    def stop_tokens(self) -> frozenset[int]:
        return frozenset({EOS})

    @property
    def pad(self) -> int:
        return PAD

    def prompt(self, text: str) -> tuple[int, ...]:
        """As :meth:`encode`: such a model knows nothing but its task."""
        return self.encode(text)

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
