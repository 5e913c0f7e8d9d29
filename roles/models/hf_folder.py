"""Write the files of a Hugging Face folder besides the weights: configuration, tokenizer, generation configuration.

For the model of ``[model] path``, the files are copied from the model's folder. For a model that rrl builds, they are
made from the job. This module does not import torch or transformers, because an export must also work without them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ...config.model_folder import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    eos_ids,
    max_length,
    read_json,
)
from ...core.run_spec import ModelSpec, TokenizerSpec
from .tokenizer import EOS, PAD, VocabularyTokenizer

_TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_CHAT_TEMPLATES = (CHAT_TEMPLATE, "chat_template.json")
_COPIED = (GENERATION_CONFIG, *_TOKENIZER_FILES, *_CHAT_TEMPLATES, "LICENSE*", "NOTICE*")
"""Patterns of the files that are copied from the folder of ``[model] path``, besides config.json."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of config.json that name the dtype of the weights: in transformers 5, and in earlier versions."""


def write_model_files(spec: ModelSpec, folder: Path) -> list[Path]:
    """Write the files of the model into ``folder``, without fsync; return their paths, with config.json as the last.

    Raises:
        ValueError: A file of the folder of ``[model] path`` is missing or cannot be read; the message names it.
        OSError: A file could not be read or written.
    """
    written = _add_files(spec, folder, _COPIED)
    config = _built_config(spec) if spec.path is None else _with_dtype(read_json(Path(spec.path) / CONFIG), spec.dtype)
    if not config:
        raise ValueError(f"[model] path: {Path(str(spec.path)) / CONFIG} does not exist; the export needs it")
    return [*written, _write_json(folder / CONFIG, config)]


def add_missing_files(spec: ModelSpec, folder: Path) -> None:
    """Add what ``folder``, which has a model's weights and configuration, lacks of the tokenizer of ``[model]``.

    Files of two tokenizers are never mixed: if the folder has one, it gets at most a chat template. The generation
    configuration and the licence are added too. Nothing is synced.

    Raises:
        ValueError: A file of the folder of ``[model] path`` is missing or cannot be read; the message names it.
        OSError: A file could not be read or written.
    """
    has_tokenizer = any((folder / name).exists() for name in _TOKENIZER_FILES)
    has_template = any((folder / name).exists() for name in _CHAT_TEMPLATES) or _template(folder) is not None
    if has_tokenizer and not has_template and spec.path is not None and _template(Path(spec.path)) is not None:
        (folder / CHAT_TEMPLATE).write_text(str(_template(Path(spec.path))), encoding="utf-8")
    kept = {*(_TOKENIZER_FILES if has_tokenizer else ()), *(_CHAT_TEMPLATES if has_template else ())}
    _add_files(spec, folder, [name for name in _COPIED if name not in kept])
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise ValueError(f"[model] path: {Path(str(spec.path)) / TOKENIZER} does not exist; the export needs it")


def _template(folder: Path) -> str | None:
    """Return the chat template in tokenizer_config.json, where older versions of transformers have it."""
    template = read_json(folder / TOKENIZER_CONFIG).get("chat_template")
    return template if isinstance(template, str) else None


def _add_files(spec: ModelSpec, folder: Path, patterns: Collection[str]) -> list[Path]:
    """Write the files of the model whose names match ``patterns``, unless the folder has them; return their paths."""
    if spec.path is None:
        missing = {name: file for name, file in _built_files(spec).items() if name in patterns}
        return [_write_json(folder / name, file) for name, file in missing.items() if not (folder / name).exists()]
    source = Path(spec.path)
    paths = [path for pattern in patterns for path in sorted(source.glob(pattern)) if path.is_file()]
    written = [Path(shutil.copyfile(path, folder / path.name)) for path in paths if not (folder / path.name).exists()]
    if not (folder / GENERATION_CONFIG).exists() and (ids := eos_ids(source)) is not None:
        written.append(_write_json(folder / GENERATION_CONFIG, {"eos_token_id": ids}))
    return written


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the configuration of a model whose weights are stored as ``dtype``."""
    changed = {
        key: value | _dtypes(value, dtype) if isinstance(value, dict) else value for key, value in config.items()
    }
    return changed and {**changed, **(_dtypes(config, dtype) or {_DTYPE_KEYS[0]: dtype})}


def _dtypes(config: Mapping[str, Any], dtype: str) -> dict[str, str]:
    return {key: dtype for key in _DTYPE_KEYS if key in config}


# ── a model that rrl builds ────────────────────────────────────────────────────────────────────────────────────────
def _built_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of the model that :func:`.policy.build_model` builds."""
    assert spec.tokenizer is not None
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": spec.dtype,
        "vocab_size": VocabularyTokenizer(spec.tokenizer).size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": max_length(None, spec.max_length),
        "initializer_range": spec.initializer_range,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def _built_files(spec: ModelSpec) -> dict[str, Any]:
    assert spec.tokenizer is not None
    pad, eos = _unused("<pad>", spec.tokenizer), _unused("<eos>", spec.tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "eos_token": eos,
        "model_max_length": max_length(None, spec.max_length),
        "clean_up_tokenization_spaces": False,
    }
    return {
        TOKENIZER: _tokenizer(spec.tokenizer, pad, eos),
        TOKENIZER_CONFIG: settings,
        GENERATION_CONFIG: {"eos_token_id": EOS, "pad_token_id": PAD},
    }


def _unused(name: str, spec: TokenizerSpec) -> str:
    """Return ``name``, put into further angle brackets until it differs from all pieces; it names a special token."""
    while name in spec.pieces:
        name = f"<{name}>"
    return name


def _tokenizer(spec: TokenizerSpec, pad: str, eos: str) -> dict[str, Any]:
    """Return the tokenizer.json that encodes as :class:`.tokenizer.VocabularyTokenizer` does.

    A text that no piece matches is an error in both tokenizers. tokenizer.json can only join decoded pieces without a
    separator or by a space, so other separators of ``spec`` are replaced by a space.
    """
    ids = {pad: PAD, eos: EOS} | {piece: EOS + 1 + place for place, piece in enumerate(spec.pieces)}
    longest_first = sorted(spec.pieces, key=len, reverse=True)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ignored = "|".join(map(re.escape, spec.ignore))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[name], "content": name, **special} for name in (pad, eos)],
        "normalizer": {"type": "Replace", "pattern": {"Regex": ignored}, "content": ""} if ignored else None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "|".join(map(re.escape, longest_first))},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": None if spec.join else {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": ""},
    }


def _write_json(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
