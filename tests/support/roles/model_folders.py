"""The smallest folder that passes as ``[model] path`` on a login node; no model can be loaded from it."""

from __future__ import annotations

import json
from pathlib import Path

_FILES = {
    "config.json": json.dumps({"max_position_embeddings": 8192, "vocab_size": 3, "eos_token_id": 0}),
    "model.safetensors": "\x02\0\0\0\0\0\0\0{}",
    "tokenizer.json": json.dumps({"model": {"vocab": {"a": 0, "b": 2}}}),
    "tokenizer_config.json": json.dumps({"chat_template": "x"}),
}


def make(folder: Path, longest: int = 8192) -> Path:
    """Write the folder; ``longest`` is its max_position_embeddings."""
    folder.mkdir(parents=True)
    for name, content in _FILES.items():
        (folder / name).write_text(content.replace("8192", str(longest)))
    return folder
