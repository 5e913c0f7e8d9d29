"""Tokenizers: their interface, a function that opens a tokenizer, and the vocabulary in job.toml.

The tokenizer of a Hugging Face folder is in :mod:`.hf_tokenizer`. This module does not import torch, because the store
and the reward role use it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ...core.run_spec import ModelSpec, TokenizerSpec

PAD = 0
EOS = 1
_SPECIAL = 2
"""Number of ids at the beginning of a :class:`VocabularyTokenizer` that are not text."""


class UnencodableText(ValueError):
    """The vocabulary of ``[model.tokenizer]`` lacks a piece of a text."""


class Tokenizer(Protocol):
    """Converts text to the token ids that the model embeds, and back."""

    size: int
    """Number of ids, including ids that are not text."""
    eos: int
    """Id that ends the answers on which the model is trained in the supervised warm start."""
    stop_tokens: frozenset[int]
    """Ids that end an answer of the model: ``eos``, and for some chat models further ids."""
    pad: int
    """Token id that fills up shorter sequences of a batch."""

    def prompt(self, text: str) -> tuple[int, ...]:
        """Return a prompt as the tokens that the model expects: with ``[model] chat``, in its chat template.

        Raises:
            ValueError: The text cannot be encoded.
        """
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of plain text, with nothing added.

        Raises:
            ValueError: The text cannot be encoded.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text up to the first id of ``stop_tokens``, ignoring ids that are not text."""
        ...

    def describe(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens for people, with the names of ids that are not text."""
        ...


def open_tokenizer(model: ModelSpec) -> Tokenizer:
    """Open the tokenizer of a model: from its folder, else the vocabulary of ``[model.tokenizer]``.

    Raises:
        ValueError: The tokenizer is unusable.
    """
    if model.path is None:
        if model.tokenizer is None:
            raise ValueError("[model] needs `path`, or a table [model.tokenizer] with `pieces`")
        return VocabularyTokenizer(model.tokenizer)
    from .hf_tokenizer import FolderTokenizer  # imported here: only the model of a folder needs the package tokenizers

    return FolderTokenizer(Path(model.path), chat=model.chat)


class VocabularyTokenizer:
    """The tokenizer of ``[model.tokenizer]``.

    Id 0 is padding and id 1 is the end of sequence. The pieces follow in their order.

    Args:
        spec: The pieces, the separator between them when tokens are decoded, and the characters of a text that are
            dropped.

    Raises:
        ValueError: The vocabulary is unusable.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        self._pieces = spec.pieces
        self._join = spec.join
        self._ignore = spec.ignore
        self._ids = {piece: _SPECIAL + i for i, piece in enumerate(self._pieces)}
        if len(self._ids) < len(self._pieces):
            twice = next(piece for i, piece in enumerate(self._pieces) if piece in self._pieces[:i])
            raise ValueError(f"[model.tokenizer] `pieces` contains {twice!r} twice; remove one of them")
        for piece in self._pieces:
            if not piece or any(character in self._ignore for character in piece):
                raise ValueError(
                    f"[model.tokenizer] piece {piece!r} can never match: it is empty, or `ignore` removes it"
                )
        self._dropped = str.maketrans("", "", self._ignore)
        self._longest = max(map(len, self._pieces), default=0)
        self.size, self.eos, self.pad = _SPECIAL + len(self._pieces), EOS, PAD
        self.stop_tokens = frozenset({EOS})

    def prompt(self, text: str) -> tuple[int, ...]:
        """Encode a prompt like any text, since a model with this tokenizer has no chat template."""
        return self.encode(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode text from the left, using at each position the longest piece that matches there.

        Raises:
            UnencodableText: No piece matches at some position.
        """
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
                raise UnencodableText(
                    f"no piece of [model.tokenizer] matches the text at {text[at : at + 10]!r} in {text[:100]!r}:"
                    f" add {text[at]!r} to `pieces` or to `ignore`"
                )
        return tuple(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text up to the end of the sequence, without padding.

        Raises:
            IndexError: An id is beyond the vocabulary.
        """
        pieces: list[str] = []
        for token in tokens:
            if token == EOS:
                break
            if token != PAD:
                pieces.append(self._pieces[token - _SPECIAL])
        return self._join.join(pieces)

    def describe(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens; ``<pad>``, ``<eos>`` and ``<ID>`` stand for ids that are not text."""
        return self._join.join(self._name(token) for token in tokens)

    def _name(self, token: int) -> str:
        if _SPECIAL <= token < self.size:
            return self._pieces[token - _SPECIAL]
        return {PAD: "<pad>", EOS: "<eos>"}.get(token, f"<{token}>")
