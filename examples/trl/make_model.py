"""Make a tiny model with random weights, a Qwen3 with a token for each digit, as a Hugging Face folder.

    python examples/trl/make_model.py [FOLDER]                  (default: ~/.cache/rrl/digits)
    python examples/trl/make_model.py --experts 8 [FOLDER]      (default: ~/.cache/rrl/digits-moe)

With ``--experts`` it is a mixture of experts, of 0.9 million weights. A real job names the folder of a pretrained model
instead. If the folder exists, nothing is done.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

TOKENS = ("<pad>", "<end>", *"0123456789")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer, of which a token uses two")
    given = parser.parse_args()
    folder = (given.folder or Path("~/.cache/rrl", "digits-moe" if given.experts else "digits")).expanduser()
    if not (folder / "tokenizer.json").exists():  # it is written last
        make(folder, given.experts)
    print(folder)


def make(folder: Path, experts: int) -> None:
    torch.manual_seed(0)
    width = 128 if experts else 64
    shape = {
        "vocab_size": len(TOKENS),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "initializer_range": 0.1,  # with the default of 0.02, no LoRA adapter could make any token likely
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": width, "norm_topk_prob": True}
    if experts:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **mixture))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)


if __name__ == "__main__":
    main()
