"""The tokenizer of a Hugging Face folder.

It reads tokenizer.json, and the special tokens in tokenizer_config.json, generation_config.json and config.json.

It does not use transformers, because its AutoTokenizer loads torch: 3.2 s of CPU time in every store and reward
process. The tokenizers library, which transformers uses too, takes 0.05 s. The tests compare the results of both
libraries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, pre_tokenizers

from ...config.input_files import require_unchanged
from ...config.model_folder import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, TextTooLong, eos_ids, read_json

_BYTES = frozenset(pre_tokenizers.ByteLevel.alphabet())
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Names by which a chat template may refer to special tokens."""


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder.

    Args:
        folder: The folder.
        chat: True to put prompts into the folder's chat template as a user's message.

    Raises:
        ValueError: The folder lacks a file or a value, or a file cannot be read; the message names it.
    """

    def __init__(self, folder: Path, *, chat: bool) -> None:
        require_unchanged(folder)
        path = folder / TOKENIZER
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain exceptions
            raise ValueError(f"[model] path: {path} cannot be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = read_json(folder / TOKENIZER_CONFIG)
        self._special = {name: token for name in _SPECIAL_TOKENS if (token := _token_text(config.get(name)))}
        own_eos = self._id("eos_token")
        self.stop_tokens = _stop_tokens(folder, own_eos)
        """Ids that end an answer of the model."""
        if not self.stop_tokens:
            raise ValueError(
                f"[model] path: {folder} defines no end of sequence: {TOKENIZER_CONFIG} has no eos_token,"
                " generation_config.json and config.json have no eos_token_id"
            )
        self.eos = min(self.stop_tokens) if own_eos is None else own_eos
        pad = self._id("pad_token")
        self.pad = self.eos if pad is None else pad
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._max_bytes = math.inf
        """Maximum number of bytes of a text."""
        self._chat: Callable[..., str] | None
        self._chat, source = _chat_template(folder, config) if chat else (None, "")
        self.has_developer = "'developer'" in source or '"developer"' in source  # as vLLM finds it out
        self.takes_parts = False
        self.takes_parts = self._joins_parts()

    @property
    def document(self) -> str:
        """The tokenizer as the content of a tokenizer.json."""
        return str(self._tokenizer.to_str())

    def limit_text(self, tokens: int) -> None:
        """Refuse, from now on, to encode a text that certainly has more than ``tokens`` tokens."""
        self._max_bytes = tokens * bytes_per_token(json.loads(self.document))

    def _joins_parts(self) -> bool:
        """Return whether the chat template takes a content in pieces, and writes them without their markup."""
        first, second = "1000001", "1000002"
        content = [{"type": "text", "text": text} for text in (first, second)]
        try:
            text = self.render([{"role": "user", "content": content}], answer_begins=True)
        except Exception:  # a template may do anything with a list
            return False
        between, found, _ = text.partition(first)[2].partition(second)
        return bool(found) and "type" not in between

    def _id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    def prompt(self, text: str) -> tuple[int, ...]:
        """Encode a prompt, including the tokens that the tokenizer or the chat template adds.

        Raises:
            ValueError: The chat template refuses the text.
        """
        if self._chat is None:
            return tuple(self._tokenizer.encode(text).ids)
        return self.encode(self.render([{"role": "user", "content": text}], answer_begins=True))

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer_begins: bool, tools: Sequence[Any] = ()) -> str:
        """Return a conversation as text, in the chat template of the folder."""
        if self._chat is None:
            raise ValueError("[model] chat: write chat = true, so that conversations get the folder's chat template")
        if self.takes_parts:
            messages = [{**message, "content": _as_parts(message["content"])} for message in messages]
        try:
            offered = {"tools": tools} if tools else {}
            return self._chat(messages=messages, add_generation_prompt=answer_begins, **offered, **self._special)
        except Exception as error:  # TemplateError, or whatever an expression of the template raises
            last = messages[-1]["content"] if messages else ""
            raise ValueError(
                f"[model] chat: the chat template cannot be applied to the prompt {last[:100]!r}: {error}"
            ) from None

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode plain text, with nothing added."""
        if (size := len(text.encode())) > self._max_bytes:
            problem = f"the text has {size:,} bytes, and a context of that length at most {self._max_bytes:,.0f}"
            raise TextTooLong(problem)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text; None if there is none."""
        number: int | None = self._tokenizer.token_to_id(text)
        return number

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including the text of special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def describe(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens, including that of special tokens, without unknown ids."""
        return self.decode_all([token for token in tokens if token >= 0])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text up to the end of the sequence, without special tokens and unknown ids."""
        end = next((index for index, token in enumerate(tokens) if token in self.stop_tokens), len(tokens))
        text: str = self._tokenizer.decode(list(tokens[:end]), skip_special_tokens=True)
        return text


def _stop_tokens(folder: Path, eos: int | None) -> frozenset[int]:
    """Return the tokenizer's own end of sequence, and the stop tokens that the model's files list."""
    given = eos_ids(folder)
    listed = given if isinstance(given, list) else [given]
    return frozenset(token for token in (eos, *listed) if isinstance(token, int))


def _token_text(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, where it is a string or a table."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


# ── the length of a text in tokens ─────────────────────────────────────────────────────────────────────────────────
_KEPT = frozenset({"NFC", "ByteLevel", "Split", "Digits"})
"""Normalizers and pre-tokenizers that drop nothing of a text, unless their ``behavior`` is to remove parts."""
_COMPOSED = 3
"""Maximum factor by which Unicode's form NFC shortens a text in UTF-8: the Kelvin sign becomes K."""


def bytes_per_token(document: dict[str, Any]) -> float:
    """Return the maximum number of bytes of a text for each of its tokens; inf if the tokenizer may drop text.

    ``document`` is the content of a tokenizer.json.
    """
    model, added = document["model"], document["added_tokens"]
    steps = [*_steps(document["normalizer"]), *_steps(document["pre_tokenizer"])]
    kinds = {step["type"] for step in steps}
    if (
        model["type"] != "BPE"
        or not {"ByteLevel"} <= kinds <= _KEPT
        or not model["vocab"].keys() >= _BYTES
        or any(step.get("behavior") == "Removed" for step in steps)
        or any(token["lstrip"] or token["rstrip"] for token in added)  # such a token takes the spaces around it
    ):
        return math.inf
    longest = max(*map(len, model["vocab"]), *(len(token["content"].encode()) for token in added))
    return longest * (_COMPOSED if "NFC" in kinds else 1)


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which may be a sequence."""
    if step is None or step["type"] != "Sequence":
        return [] if step is None else [step]
    nested: list[dict[str, Any]] = step.get("normalizers") or step.get("pretokenizers") or []
    return [inner for each in nested for inner in _steps(each)]


# ── the chat template ──────────────────────────────────────────────────────────────────────────────────────────────
def _chat_template(folder: Path, config: dict[str, Any]) -> tuple[Callable[..., str], str]:
    """Return a function that renders the chat template to a text, and the source of the template.

    The keyword arguments of the function are the variables of the template, such as ``messages``. The template file
    takes precedence over the template in the configuration, as in transformers. ``strftime_now`` is not available, so
    that a template that would write today's date (Llama 3) writes a fixed date. The prompt of an item is therefore the
    same in every process on every day.
    """
    file = folder / CHAT_TEMPLATE
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ValueError(f"[model] chat: {folder} has no chat template; remove `chat`, or add {CHAT_TEMPLATE}")
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    jinja.filters["tojson"] = _to_json
    jinja.globals["raise_exception"] = _raise_template_error
    try:
        template = jinja.from_string(source)
    except TemplateError as error:
        raise ValueError(f"[model] chat: the chat template of {folder} cannot be read: {error}") from None
    return template.render, source


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks an assistant's message for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between ``{% generation %}`` and ``{% endgeneration %}``."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Encode as JSON without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(reason: str) -> None:
    raise TemplateError(reason)


def _as_parts(content: Any) -> Any:
    """Return the content of a message in pieces, as vLLM gives it to a template that joins pieces itself."""
    return [{"type": "text", "text": content}] * bool(content) if isinstance(content, str) else content
