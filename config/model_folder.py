"""Check on a login node whether a Hugging Face folder can be ``[model] path``, without torch or transformers.

transformers itself may still refuse a folder that passes these checks. Roles that only handle tokens read the
tokenizer's properties through the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
SHAPE_KEYS = ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "initializer_range")
"""Keys of [model] for a model that rrl builds; with ``path``, config.json contains them."""
BUILT_MAX_LENGTH = 64
"""Default number of tokens of prompt and answer for a model that rrl builds."""


class TextTooLong(ValueError):
    """A text has more bytes than a context of the model's maximum length can have."""


def max_length(path: str | None, max_tokens: int | None = None) -> int:
    """Return the maximum number of tokens of prompt and answer together.

    Args:
        path: ``[model] path``; None if rrl builds the model.
        max_tokens: ``[model] max_length``; None if it is not set.

    Raises:
        ValueError: config.json in ``path`` is needed and is missing, or has no such number.
    """
    if max_tokens is not None:
        return max_tokens
    if path is None:
        return BUILT_MAX_LENGTH
    file = Path(path) / CONFIG
    config = read_json(file)
    if not config:
        fix = "name the folder of a model, or set `max_length` in [model]"
        raise ValueError(f"{file} does not exist, or is empty, so the maximum length of a text is unknown; {fix}")
    for table in _tables(config):
        for key in ("max_position_embeddings", "n_positions", "n_ctx"):
            if isinstance(limit := table.get(key), int):
                return limit
    raise ValueError(
        f"{file} has no max_position_embeddings (the maximum length of a text); set `max_length` in [model]"
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files whose tensors are the model's weights, because others may contain them in another format.

    Raises:
        ValueError: The index cannot be read.
    """
    shards = read_json(folder / INDEX).get("weight_map")
    if isinstance(shards, dict):
        return [folder / name for name in sorted({str(name) for name in shards.values()})]
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob(WEIGHTS))


def eos_ids(folder: Path) -> Any:
    """Return the token id (an int) or ids (a list) that end the model's output; None if the folder names no id."""
    tables = read_json(folder / GENERATION_CONFIG), *_tables(read_json(folder / CONFIG))
    return next((ids for table in tables if (ids := table.get("eos_token_id")) is not None), None)


def _tables(config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the tables of a config.json that describe a language model; one of several modalities nests its own."""
    return config, config.get("text_config") or {}


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a config.json that has the sizes of the language model."""
    return _tables(config)[-1] or config


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist.

    Raises:
        ValueError: The file cannot be read or is not a JSON object; the text names the file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} does not contain a JSON object")
    return document


_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_UNSUPPORTED_TYPES = {"gpt_neox": "its weights are arranged differently from the names in its files"}
"""Reason why models of a type cannot be trained, by ``model_type``."""
MAX_HEADER_BYTES = 100 * 2**20
"""Maximum size of the header of a safetensors file in bytes, as in safetensors itself."""


class ModelFolderProblem(Struct, frozen=True):
    """The reason why a folder cannot be used as ``[model] path``."""

    key: str
    """Key of ``[model]`` that must be changed."""
    text: str
    """What is wrong, and what would be right."""


def validate(
    folder: Path, chat: bool, max_tokens: int | None = None, *, computes: bool = True, trains: bool = True
) -> ModelFolderProblem | None:
    """Return why the folder cannot be ``[model] path``, or None if no problem was found.

    Its tokenizer and lengths are needed in every job; the rest only by the built-in roles that load it.

    Args:
        folder: The folder.
        chat: Whether prompts need a chat template.
        max_tokens: ``[model] max_length``; None if it is not set.
        computes: Whether a role computes with the model that rrl builds from the folder.
        trains: Whether the built-in trainer begins with the weights of the folder.
    """
    if not folder.is_dir():
        return ModelFolderProblem("path", f"{str(folder)!r} is a file; name the folder that contains it")
    files = ((CONFIG, "model", computes), (WEIGHTS, "model", trains), (TOKENIZER, "tokenizer", True))
    for pattern, written_for, needed in files:
        if needed and next(folder.glob(pattern), None) is None:
            fix = f"name a folder that save_pretrained of transformers wrote for a {written_for}"
            return ModelFolderProblem("path", f"{str(folder)!r} has no {pattern}; {fix}")
    try:
        settings = read_json(folder / TOKENIZER_CONFIG)
        unsupported = [*_unsupported_kinds(folder)] if computes else []
        too_long = [*_lengths(folder, max_tokens)]
        others = [*(_weights(folder) if trains else ()), *_tokens(folder, settings, computes)]
    except ValueError as error:
        return ModelFolderProblem("path", str(error))
    for key, texts in (("path", unsupported), ("max_length", too_long), ("path", others)):
        if texts:
            return ModelFolderProblem(key, texts[0])
    if chat and not (folder / CHAT_TEMPLATE).exists() and "chat_template" not in settings:
        return ModelFolderProblem(
            "chat", f"{str(folder)!r} has no chat template; remove chat = true, or add {CHAT_TEMPLATE}"
        )
    return None


def why_unsupported(folder: Path) -> str | None:
    """Return why rrl cannot build the model that config.json of the folder describes; None if it can.

    Raises:
        ValueError: config.json cannot be read.
    """
    return next(_unsupported_kinds(folder), None)


def _unsupported_kinds(folder: Path) -> Iterator[str]:
    path = folder / CONFIG
    config = read_json(path)
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if not str(name).endswith("ForCausalLM"):
            yield f"{path}: {name} is not a causal language model; name a model whose architecture ends in ForCausalLM"
    for table in _tables(config):
        for key in _EXPERT_COUNT_KEYS:
            if isinstance(count := table.get(key), int) and count > 1:
                yield f"{path}: {key} = {count}: mixtures of experts are not supported; name a dense model"
    if (reason := _UNSUPPORTED_TYPES.get(str(config.get("model_type")))) is not None:
        yield f"{path}: {config['model_type']} is not supported: {reason}; name another model"
    if config.get("quantization_config"):
        yield f"{path}: its weights are quantized; name the folder of the unquantized model"


def _lengths(folder: Path, max_tokens: int | None) -> Iterator[str]:
    if max_tokens is None:
        max_length(str(folder))
        return
    try:
        limit = max_length(str(folder))
    except ValueError:  # config.json has no limit, but job.toml does
        return
    if max_tokens > limit:
        yield f"max_length = {max_tokens} is more than the {limit} that {folder / CONFIG} allows; lower it"


def _weights(folder: Path) -> Iterator[str]:
    """Yield the weight files that are missing or incomplete."""
    for path in weight_files(folder):
        if not path.is_file():
            yield f"{str(folder)!r} lacks {path.relative_to(folder)}, which {INDEX} names; copy it into the folder"
    for path in sorted(folder.glob(WEIGHTS)):
        try:
            read_header(path)
        except ValueError as error:
            yield f"{error}; copy it again"


def read_header(path: Path) -> dict[str, Any]:
    """Return the dtype, shape and data_offsets of each tensor in a safetensors file, by name.

    The header is its length (8 bytes, little-endian), then JSON with the offset at which each tensor ends.

    Raises:
        ValueError: The file cannot be read, or is shorter than its header says; the text names the file.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        expected_size = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise ValueError(f"{path} is not a safetensors file") from None
    if size < expected_size:
        raise ValueError(f"{path} has only {size} of the {expected_size} bytes that its header declares")
    return tensors


def _tokens(folder: Path, settings: dict[str, Any], computes: bool) -> Iterator[str]:
    """Yield the problems of the tokenizer: no end of sequence, or tokens that a model of rrl does not embed."""
    path = folder / TOKENIZER
    tokenizer = read_json(path)
    model = tokenizer.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        yield f"{path} is not a tokenizer; name a folder that save_pretrained of transformers wrote for one"
        return
    if settings.get("eos_token") is None and eos_ids(folder) is None:
        yield f"{str(folder)!r} defines no end of sequence; {TOKENIZER_CONFIG} needs `eos_token`"
    embedded = read_json(folder / CONFIG).get("vocab_size")
    ids = [token["id"] for token in tokenizer.get("added_tokens") or () if isinstance(token, dict)]
    ids += model["vocab"].values() if isinstance(model["vocab"], dict) else [len(model["vocab"]) - 1]
    tokens = 1 + max((token_id for token_id in ids if isinstance(token_id, int)), default=-1)
    if computes and isinstance(embedded, int) and tokens > embedded:
        yield (
            f"{path} has {tokens} tokens, but the model of {folder / CONFIG} embeds {embedded}; name a folder whose"
            " tokenizer fits its model"
        )
