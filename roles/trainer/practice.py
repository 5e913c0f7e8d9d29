"""What a process that is kept warm does beforehand: a step of a tiny model, in a gang of its own that ends with it.

The first step of a process pays for what torch loads and sets up at first use: 0.43 s against 0.08 s after practice,
for a tiny model on two CPU ranks; for a large one no gain was shown (docs/sources.md, torch). Not where the trainer has
GPUs: torch's first ``backward`` asks CUDA for its devices, be it on a CPU, and after that it could no longer be said
which of them are this process's. That is not known yet.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # what the first checkpoint would load
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rrl.roles.model import ModelSpec, build_model

_TINY = ModelSpec(
    hidden_size=16, intermediate_size=16, layers=1, heads=1, kv_heads=1, head_dim=16, initializer_range=0.05
)
_VOCABULARY = 16


def practise() -> None:
    """One step; the process is as before but for what is loaded. Random states too."""
    with torch.random.fork_rng(devices=[]):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            model = build_model(_TINY, _VOCABULARY, seed=0)
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            tokens = torch.zeros((1, 4), dtype=torch.long)
            model(input_ids=tokens, use_cache=False).logits.sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finally:
            dist.destroy_process_group()
