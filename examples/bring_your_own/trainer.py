"""A user's own trainer. Only the lines that contain `rrl`, `me` or `batch` use rrl."""

from __future__ import annotations

import time

import torch
from policy import Policy
from torch import Tensor

import rrl

STEP_SECONDS = 0.1
"""Minimum time (s) of a step; steps of a real model are longer. New weights reach the rollouts within about 0.1 s. With
steps of 0.01 s, rollouts would sample with weights of ten steps ago, and the policy learns nothing (tried)."""


def main() -> None:
    torch.set_num_threads(1)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters())
    with rrl.join() as me:
        optimizer.param_groups[0]["lr"] = me.job.trainer.learning_rate
        if (files := me.committed_files()) is not None:
            saved = torch.load(files["state.pt"], weights_only=True)
            policy.load_state_dict(saved["policy"])
            optimizer.load_state_dict(saved["optimizer"])
        me.publish(me.committed or 0, rrl.pack(policy.state_dict()))
        for batch in me.batches(after=me.committed):
            with me.phase("train"):
                loss = policy_loss(policy, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(STEP_SECONDS)
            with me.phase("checkpoint"):
                file = me.checkpoint_dir(batch.number) / "state.pt"
                torch.save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, file)
                me.commit(batch.number, [file], {"loss": loss.item()})
            me.publish(batch.number, rrl.pack(policy.state_dict()))


def policy_loss(policy: Policy, batch: rrl.Batch) -> Tensor:
    """Return the REINFORCE loss with the group's mean reward as baseline, and importance ratios for older weights."""
    trajectories = batch.trajectories
    rewards = torch.tensor([one.training for one in trajectories])
    groups = torch.tensor([one.group for one in trajectories])
    means = {int(group): rewards[groups == group].mean() for group in groups.unique()}
    advantages = rewards - torch.stack([means[one.group] for one in trajectories])
    logprobs = policy(torch.tensor([one.prompt for one in trajectories]))
    chosen = logprobs.gather(1, torch.tensor([one.tokens for one in trajectories]))[:, 0]
    ratio = (chosen - torch.tensor([one.logprobs[0] for one in trajectories])).exp()
    return -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).mean()


if __name__ == "__main__":
    main()
