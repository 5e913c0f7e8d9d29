"""Small Hugging Face folders as ``save_pretrained`` writes them, for ``[model] path``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<pad>", "<end>", "<start>", "<turn>")
VOCABULARY = len(SPECIAL) + 256
"""One token for each byte, besides the special tokens."""
END, TURN = 1, 3
CHAT = """{%- for message in messages %}
    {%- if message['content'] == 'forbidden' %}{{ raise_exception('not this') }}{% endif %}
    {{- bos_token + message['role'] + ': ' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>assistant: ' }}{% endif %}
"""
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "vocab_size": VOCABULARY,
    "bos_token_id": 2,
    "eos_token_id": END,
    "pad_token_id": 0,
}


def qwen3(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a Qwen3 model of two layers whose embeddings and head are separate tensors."""
    config = Qwen3Config(**_SHAPE | {"tie_word_embeddings": False} | changes)
    return _saved(Qwen3ForCausalLM, config, path, seed)


def tied_llama(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a Llama model of two layers whose embeddings are also its head, as in SmolLM2."""
    config = LlamaConfig(**_SHAPE | {"tie_word_embeddings": True} | changes)
    return _saved(LlamaForCausalLM, config, path, seed)


def _saved(kind: Any, config: Any, path: Path, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).float()
        with torch.no_grad():  # the norms must also differ from each other
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    tokenizer(path)
    return path


def tokenizer(path: Path) -> None:
    """Write a tokenizer of single bytes with a chat template; it puts a start token before plain prompts."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate((*SPECIAL, *characters))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 2)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<end>",
        bos_token="<start>",
        additional_special_tokens=["<turn>"],
    )
    fast.chat_template = CHAT
    fast.save_pretrained(path)


def rewrite(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; a value of None removes the key."""
    template = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({key: value for key, value in (template | changes).items() if value is not None}))
