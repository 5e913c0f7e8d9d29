"""Makes real versions of a model: each version has the weights after one more step of rrl's own learner.

``python -m rrl.benchmarks._delta_updates FOLDER RATE`` trains SmolLM2-135M-Instruct with the learning rate RATE, and
writes the files FOLDER/1 to FOLDER/10, one for each step. The master weights are float32; the files contain all weights
as bfloat16 in the layout of a version. Each step has eight new trajectories of random tokens, in two groups with random
rewards. The log-probabilities are those of the model before the step, as of a rollout without lag.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy
from msgspec import Struct

from rrl.examples.smollm2.make_model import FOLDER
from rrl.transport.weights.manifest import layout

RATES = ("1e-6", "1e-5", "1e-3")
VERSIONS = 10
TRAJECTORIES, GROUP_SIZE, PROMPT_TOKENS, ANSWER_TOKENS = 8, 4, 16, 32
_STEPS = 1000
"""Length of the run, over which the learning rate decreases: by less than 1 % in these steps."""
_WORD = numpy.dtype("<u2")


class Versions(Struct, frozen=True):
    """The files of the versions of one learning rate."""

    rate: str
    paths: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return self.paths[0].stat().st_size

    def words(self, index: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint16]]:
        """Return the file of a version as 2-byte words, mapped into memory."""
        return numpy.memmap(self.paths[index], _WORD, mode="r")

    def changed_shares(self) -> list[float]:
        """Return for each version from the second on the share of its 2-byte words that differ from the previous."""
        words = [self.words(index) for index in range(len(self.paths))]
        return [float(numpy.mean(new != old)) for old, new in pairwise(words)]


def make_versions(folder: Path, rate: str, count: int = VERSIONS) -> Versions:
    """Make the versions of one learning rate in a process of its own, which returns the memory; keep existing files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / str(number) for number in range(1, count + 1))
    if not all(path.exists() for path in paths):
        subprocess.run([sys.executable, "-m", "rrl.benchmarks._delta_updates", folder, rate], check=True)
    return Versions(rate, paths)


def _train(folder: Path, rate: float) -> None:
    import torch

    from rrl.core.run_spec import ModelSpec, TrainerSettings
    from rrl.core.types import Version
    from rrl.roles.models.policy import build_model
    from rrl.roles.trainer.learner import Learner
    from rrl.roles.trajectories.batches import Batch
    from rrl.roles.trajectories.types import Trajectory

    spec = ModelSpec(path=str(FOLDER.expanduser()), dtype="bfloat16")
    model = build_model(spec, vocabulary=1, seed=0)
    learner = Learner(model, TrainerSettings(learning_rate=rate), steps=_STEPS, temperature=1.0)
    chance, vocabulary = random.Random(0), model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(vocabulary) for _ in range(count))

    @torch.no_grad()
    def logprobs(sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        sequence = torch.tensor(sequences)
        logits = model(sequence[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
        chosen = torch.log_softmax(logits, -1).gather(-1, sequence[:, PROMPT_TOKENS:, None])
        return chosen.squeeze(-1).tolist()

    for number in range(1, VERSIONS + 1):
        prompts = [tokens(PROMPT_TOKENS) for _ in range(TRAJECTORIES // GROUP_SIZE)]
        answers = [tokens(ANSWER_TOKENS) for _ in range(TRAJECTORIES)]
        sampled = logprobs([prompts[index // GROUP_SIZE] + answer for index, answer in enumerate(answers)])
        trajectories = tuple(
            Trajectory(
                id=index,
                group=index // GROUP_SIZE,
                prompt=prompts[index // GROUP_SIZE],
                tokens=answer,
                logprobs=tuple(sampled[index]),
                versions=(Version(number - 1, 1),) * ANSWER_TOKENS,
                reward=(reward := chance.random()),
                training=reward,
            )
            for index, answer in enumerate(answers)
        )
        learner.open(number)
        learner.add(Batch(number, (), "", trajectories))
        learner.close()
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in learner.weights().items()}
        specs, nbytes = layout([(name, "", tuple(each.shape), 2 * each.numel()) for name, each in weights.items()])
        flat = numpy.zeros(nbytes, numpy.uint8)
        for place, tensor in zip(specs, weights.values(), strict=True):
            flat[place.offset : place.offset + place.nbytes] = tensor.view(torch.uint8).reshape(-1).numpy()
        written = folder / f"{number}.part"
        flat.tofile(written)
        written.rename(folder / str(number))


if __name__ == "__main__":
    _train(Path(sys.argv[1]), float(sys.argv[2]))
