"""Check on a login node whether a Hugging Face folder can be ``[model] path``, without torch or transformers.

A folder that passes here may still be refused by transformers itself. The roles that only handle tokens read the
tokenizer's properties through the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
SHAPE_KEYS = (
    "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "initializer_range",
)  # fmt: skip
"""keys of [model] for one that is built here; with ``path`` config.json says it"""
BUILT_MAX_LENGTH = 64
"""tokens of prompt and answer of a model that is built here, where job.toml does not say"""


def max_length(model: Mapping[str, Any]) -> int:
    """Tokens of prompt and answer together, of the resolved ``[model]``: what it says, else what config.json of its
    ``path`` does. Raises ValueError."""
    if (length := model.get("max_length")) is not None:
        return int(length)
    if model.get("path") is None:
        return BUILT_MAX_LENGTH
    path = Path(model["path"]) / CONFIG
    config = read_json(path)
    if not config:
        raise ValueError(f"{path} is not there, or empty")
    for table in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "n_positions", "n_ctx"):
            if isinstance(most := table.get(key), int):
                return most
    raise ValueError(f"{path} does not say how long a text may be (max_position_embeddings); write max_length")


def eos_ids(folder: Path) -> Any:
    """The ids at which the folder's model was made to stop, one or a list; None where it says none."""
    given = read_json(folder / GENERATION_CONFIG).get("eos_token_id")
    return read_json(folder / CONFIG).get("eos_token_id") if given is None else given


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty where there is none. Raises ValueError, naming the file, for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no JSON object")
    return document


_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_UNSUPPORTED_TYPES = {"gpt_neox": "its weights are put together otherwise than its file names them"}
"""model_type → why it is not trained"""
_MAX_HEADER_BYTES = 100 * 2**20
"""bytes; safetensors' own limit of a file's header"""


class ModelFolderProblem(Struct, frozen=True):
    """Why a folder cannot be used as ``[model] path``."""

    key: str
    """of ``[model]``, that is to be changed"""
    text: str
    """what is wrong, and what would be right"""


def validate(folder: Path, chat: bool, max_tokens: int | None = None) -> ModelFolderProblem | None:
    """Return why the folder cannot be ``[model] path``; None: nothing speaks against it. ``longest`` is ``[model]
    max_length``."""
    if not folder.is_dir():
        return ModelFolderProblem("path", f"{str(folder)!r} is a file; name the folder that it is in")
    for pattern, made_by in ((CONFIG, "model"), (WEIGHTS, "model"), (TOKENIZER, "tokenizer")):
        if next(folder.glob(pattern), None) is None:
            fix = f"name a folder that save_pretrained of transformers made of a {made_by}"
            return ModelFolderProblem("path", f"{str(folder)!r} has no {pattern}; {fix}")
    try:
        settings = read_json(folder / TOKENIZER_CONFIG)
        kinds, too_long = [*_unsupported_kinds(folder)], [*_lengths(folder, max_tokens)]
        others = [*_weights(folder), *_tokens(folder, settings)]
    except ValueError as error:
        return ModelFolderProblem("path", str(error))
    for key, texts in (("path", kinds), ("max_length", too_long), ("path", others)):
        if texts:
            return ModelFolderProblem(key, texts[0])
    if chat and not (folder / CHAT_TEMPLATE).exists() and "chat_template" not in settings:
        return ModelFolderProblem(
            "chat", f"{str(folder)!r} has no chat template; remove chat = true, or add {CHAT_TEMPLATE}"
        )
    return None


def _unsupported_kinds(folder: Path) -> Iterator[str]:
    """Of models that are not trained."""
    path = folder / CONFIG
    config = read_json(path)
    given = config.get("architectures")
    architectures = given if isinstance(given, list) else []
    for name in architectures:
        if not str(name).endswith("ForCausalLM"):
            yield f"{path}: {name} is no causal language model; name a model whose architecture is one (...ForCausalLM)"
    for table in (config, config.get("text_config") or {}):
        for key in _EXPERT_COUNT_KEYS:
            if isinstance(count := table.get(key), int) and count > 1:
                yield f"{path}: {key} = {count}: mixtures of experts are not supported; name a dense model"
    if (why := _UNSUPPORTED_TYPES.get(str(config.get("model_type")))) is not None:
        yield f"{path}: {config['model_type']} is not supported: {why}; name another model"
    if config.get("quantization_config"):
        yield f"{path}: its weights are quantized; name the folder of the model before that"


def _lengths(folder: Path, longest: int | None) -> Iterator[str]:
    if longest is None:
        max_length({"path": str(folder)})
        return
    try:
        most = max_length({"path": str(folder)})
    except ValueError:  # config.json does not say: job.toml does
        return
    if longest > most:
        yield f"max_length = {longest} is more than the {most} that {folder / CONFIG} allows; lower it"


def _weights(folder: Path) -> Iterator[str]:
    """Files that are not there, or not whole."""
    shards = read_json(folder / INDEX).get("weight_map")
    for name in sorted(set(shards.values())) if isinstance(shards, dict) else ():
        if not (folder / str(name)).is_file():
            yield f"{str(folder)!r} lacks {name}, which {INDEX} names; copy it there"
    for path in sorted(folder.glob(WEIGHTS)):
        if why := _damage(path):
            yield f"{path} {why}; copy it there again"


def _damage(path: Path) -> str:
    """By a safetensors file's header: its length (8 bytes, little-endian), then where each tensor ends."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return "is no safetensors file"
    return "" if size >= whole else f"has {size} bytes of the {whole} that its header speaks of"


def _tokens(folder: Path, settings: dict[str, Any]) -> Iterator[str]:
    """What the tokenizer knows, and the model does not; and whether anything ends a text."""
    path = folder / TOKENIZER
    tokenizer = read_json(path)
    model = tokenizer.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        yield f"{path} is no tokenizer; name a folder that save_pretrained of transformers made of one"
        return
    if settings.get("eos_token") is None and eos_ids(folder) is None:
        yield f"{str(folder)!r} names no end of sequence; {TOKENIZER_CONFIG} needs eos_token"
    embeds = read_json(folder / CONFIG).get("vocab_size")
    ids = [token["id"] for token in tokenizer.get("added_tokens") or () if isinstance(token, dict)]
    ids += model["vocab"].values() if isinstance(model["vocab"], dict) else [len(model["vocab"]) - 1]
    known = 1 + max((one for one in ids if isinstance(one, int)), default=-1)
    if isinstance(embeds, int) and known > embeds:
        yield f"{path} has {known} tokens, the model of {folder / CONFIG} embeds {embeds}; name a folder where they fit"
