"""Where torch computes in a role: on the GPU that the role was given, or on the CPU where it asked for none."""

from __future__ import annotations

import torch

from rrl.roles.refusal import refuse
from rrl.spec.launch import Launch


def given_device(launch: Launch) -> torch.device:
    """Ends the process where torch finds no GPU though one was asked for: on the CPU it would go on, many times slower,
    and nothing would say so. This wakes the driver up: a process that is kept warm and does not know its GPU yet asks
    when it does."""
    if not launch.gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        refuse(f"[roles.{launch.role}] gpus = {launch.gpus}, and torch {torch.__version__}, {built}, finds no GPU on"
               f" {launch.node}: install a torch for its driver, or write gpus = 0")  # fmt: skip
    return torch.device("cuda", 0)
