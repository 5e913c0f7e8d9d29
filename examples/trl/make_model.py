"""Make the model's folder of examples/trl: a Qwen3 with random weights, and a token for each digit.

    python examples/trl/make_model.py [FOLDER]        (default: ~/.cache/rrl/digits)

A real job names the folder of a pretrained model instead. If the folder exists, nothing is done.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

FOLDER = Path("~/.cache/rrl/digits")
TOKENS = ("<pad>", "<end>", *"0123456789")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER).expanduser()
    if not (folder / "tokenizer.json").exists():  # it is written last
        make(folder)
    print(folder)


def make(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.1,  # with the default of 0.02, no LoRA adapter could make any token likely
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)


if __name__ == "__main__":
    main()
