"""A small Mixture of Experts of transformers, and ranks that shard it with FSDP2 and write their parts to files."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

import rrl


def moe(tied: bool = False) -> PreTrainedModel:
    """Return the same model with each call."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        tie_word_embeddings=tied,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def write_part(rank: int, world: int, folder: str) -> None:
    """Write the rank's part to ``part-<rank>.safetensors``."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = moe()
    for layer in model.model.layers:
        fully_shard(layer, mesh=(mesh := init_device_mesh("cpu", (world,))))
    fully_shard(model, mesh=mesh)
    assert isinstance(model.lm_head.weight, DTensor)
    tensors = {name: tensor.clone() for name, tensor in rrl.hf_tensors(model, rank, world)}
    save_file(tensors, Path(folder, f"part-{rank}.safetensors"))
    dist.barrier()
