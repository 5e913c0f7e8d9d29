"""A user's own trainer: GRPO in plain torch with FSDP2. Only the lines that contain `rrl` or `me` are about rrl."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

import rrl

CLIP = 0.2


def main() -> None:
    torch.set_num_threads(1)
    me = rrl.join()
    model = build_model(me.job.model, me.job.seed)  # a standby process does this before it is needed
    with me:
        dist.init_process_group()  # rank, world and address are in the environment
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=me.job.trainer.learning_rate)
        if (folder := me.committed_folder(share=(me.rank, me.world))) is not None:
            load(model, optimizer, folder / "dcp")
        weights = whole_weights(model)
        if me.rank == 0:
            me.publish(me.committed or 0, rrl.pack(weights))
        for batch in me.batches(after=me.committed):
            with me.phase("train"):
                loss = train_step(model, optimizer, advantages(batch.trajectories)[me.rank :: me.world])
            with me.phase("checkpoint"):
                tree = from_rank0(me.checkpoint_dir(batch.number) / "dcp" if me.rank == 0 else None)
                save(model, optimizer, tree)
                if me.rank == 0:
                    me.commit(batch.number, [tree], {"loss": loss})
            with me.phase("publish"):
                weights = whole_weights(model)
                if me.rank == 0:
                    me.publish(batch.number, rrl.pack(weights))


def build_model(spec, seed) -> Qwen3ForCausalLM:
    """Return the model of the table [model], on every rank with the same random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(spec.tokenizer.pieces) + 2,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


def advantages(trajectories):
    """Return (trajectory, its reward minus the mean reward of its group) for all trajectories of a step."""
    rewards = defaultdict(list)
    for one in trajectories:
        rewards[one.group, one.agent].append(one.training)
    return [(one, one.training - fmean(rewards[one.group, one.agent])) for one in trajectories]


def train_step(model, optimizer, mine) -> float:
    """Make one step on the trajectories of this rank; FSDP averages the gradients over the ranks. Return the loss."""
    tokens = pad_sequence([torch.tensor([*one.prompt, *one.tokens]) for one, _ in mine], batch_first=True)
    logprobs = model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[:, :, 0]
    losses = []
    for row, (one, advantage) in zip(logprobs, mine, strict=True):
        answer = row[len(one.prompt) - 1 :][: len(one.tokens)]
        ratio = (answer - torch.tensor(one.logprobs)).exp()  # tokens may come from older weights
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean())
    loss = torch.stack(losses).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def whole_weights(model):
    """Return the state dict of the whole model on rank 0, and an empty one on the other ranks."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save(model, optimizer, folder) -> None:
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)


def load(model, optimizer, folder) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def from_rank0(folder) -> Path:
    values = [folder]
    dist.broadcast_object_list(values)
    return values[0]


if __name__ == "__main__":
    main()
