"""``[model] path``: what can be said of a Hugging Face folder without torch or transformers, on a login node and in
roles that only speak of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
SHAPE = (
    "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "initializer_range",
)  # fmt: skip
"""keys of [model] for one that is built here; with ``path`` config.json says it"""
BUILT_MAX_LENGTH = 64
"""tokens of prompt and answer of a model that is built here, where job.toml does not say"""


def max_length(model: Mapping[str, Any]) -> int:
    """Tokens of prompt and answer together, of the resolved ``[model]``: what it says, else what config.json of its
    ``path`` does. Raises ValueError."""
    if (said := model.get("max_length")) is not None:
        return int(said)
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


def ends_of(folder: Path) -> Any:
    """The ids at which the folder's model was made to stop, one or a list; None where it says none."""
    given = read_json(folder / GENERATION_CONFIG).get("eos_token_id")
    return read_json(folder / CONFIG).get("eos_token_id") if given is None else given


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty where there is none. Raises ValueError, naming the file, for anything else."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"{path} holds no JSON object")
    return said
