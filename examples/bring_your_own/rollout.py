"""A user's own rollout. Only the lines that contain `rrl`, `me`, `work` or `new` use rrl."""

from __future__ import annotations

import torch
from policy import Policy

import rrl


def main() -> None:
    torch.set_num_threads(1)
    policy = Policy()
    with rrl.join() as me:
        version = None
        for work in me.work(at_most=me.rollout.lease):
            if new := me.new_weights():
                policy.load_state_dict(dict(rrl.unpack(new.tensors, new.flat)))
                version = new.version
            with me.phase("generate"), torch.no_grad():
                logprobs = policy(torch.tensor([item.prompt for item in work.items]))
                answers = torch.distributions.Categorical(logits=logprobs).sample()
                chosen = logprobs.gather(1, answers[:, None])[:, 0]
                segments = [
                    rrl.Segment(item.trajectory, 0, (int(token),), (float(logprob),), version)
                    for item, token, logprob in zip(work.items, answers, chosen, strict=True)
                ]
                work.append(segments, finished=[item.trajectory for item in work.items])


if __name__ == "__main__":
    main()
