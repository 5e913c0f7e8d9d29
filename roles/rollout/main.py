"""The built-in rollout: take new weights when there are any, take work, sample, hand over. ``python -m`` runs it."""

from __future__ import annotations

import msgspec
import torch

import rrl
from rrl.roles.model import ModelSpec, build_model
from rrl.roles.rollout.engine import Engine, Sampling
from rrl.roles.rollout.torch_engine import TorchEngine, seed_of
from rrl.roles.tensors import unpack
from rrl.roles.tokenizer import EOS, Tokenizer

LOG_EVERY = 10
"""Versions between two lines in the log."""


def main() -> None:
    with rrl.join() as me:
        engine = _engine(me)
        sampling = Sampling(me.job["sampling"]["temperature"], me.settings["segment_tokens"])
        for work in me.work(at_most=me.settings["lease"]):
            if new := me.new_weights():
                with me.phase("loading_weights"):
                    engine.load(new.version, unpack(new.tensors, new.flat))
                    engine.probe()
                if new.version.step % LOG_EVERY == 0:
                    print(f"weights {new.version}", flush=True)
            with me.phase("generate"):
                for segments, finished in engine.generate(work.items, sampling):
                    engine.drop(work.append(segments, finished))
                    if me.stopping.is_set():  # what was made is durable; the next rollout goes on from there
                        break
        engine.close()


def _engine(me: rrl.Worker) -> Engine:
    torch.set_num_threads(me.settings["threads"])
    seed = me.job["run"]["seed"]
    tokenizer = Tokenizer(me.job["model"]["tokenizer"])
    model = build_model(msgspec.convert(me.job["model"], ModelSpec), tokenizer.size, seed)
    return TorchEngine(model, eos=EOS, seed=seed_of(seed, me.launch.life))


if __name__ == "__main__":
    main()
