"""Answers to agents as OpenAI's objects, made of the sampled tokens of turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..models.tokenizer import Tokenizer
from .call import Call

_INCOMPLETE = "\ufffd"
"""Character that stands for bytes which are not yet a character: the next token may complete them."""


class SampledAnswer:
    """One answer, which grows by tokens.

    Args:
        call: The request.
        index: Number of the answer among those to the request.
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, call: Call, index: int, tokenizer: Tokenizer) -> None:
        self._call, self._index, self._tokenizer = call, index, tokenizer
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._finished = False
        self._sent = ""

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return len(self._tokens)

    def grow(self, tokens: Sequence[int], logprobs: Sequence[float], finished: bool) -> None:
        """Add tokens."""
        self._tokens += tokens
        self._logprobs += logprobs
        self._finished = finished

    def choice(self) -> dict[str, Any]:
        """Return the complete answer."""
        text = self._tokenizer.decode(self._tokens)
        if self._call.messages is None:
            content: dict[str, Any] = {"text": text}
        else:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return self._object(content, self._tokens, self._logprobs)

    def delta(self, since: int) -> dict[str, Any]:
        """Return the part of a stream for the tokens from ``since`` on.

        Text that the next token may change is held back until then.
        """
        answer = self._tokenizer.decode(self._tokens)
        stable = self._finished or (not answer.endswith(_INCOMPLETE) and answer.startswith(self._sent))
        added = answer[len(self._sent) :] if stable else ""
        self._sent += added
        if self._call.messages is None:
            content: dict[str, Any] = {"text": added}
        else:
            content = {"delta": ({"role": "assistant"} if since == 0 else {}) | {"content": added}}
        return self._object(content, self._tokens[since:], self._logprobs[since:])

    def _object(self, content: dict[str, Any], tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        ends = bool(self._tokens) and self._tokens[-1] in self._tokenizer.stop_tokens
        reason = None if not self._finished else "stop" if ends else "length"
        choice = {"index": self._index, **content, "finish_reason": reason, "logprobs": None}
        if self._call.logprobs:
            choice["logprobs"] = self._logprob_object(tokens, logprobs)
        if self._call.return_token_ids:
            choice["token_ids"] = list(tokens)
        return choice

    def _logprob_object(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        texts = [self._tokenizer.decode([token]) for token in tokens]
        if self._call.messages is None:
            return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": []}
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ],
            "refusal": None,
        }


def usage(prompt_tokens: int, answers: Sequence[SampledAnswer]) -> dict[str, int]:
    """Return the numbers of tokens of a request and its answers."""
    sampled = sum(answer.length for answer in answers)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}
