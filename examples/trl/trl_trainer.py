"""TRL's GRPOTrainer, unmodified, as the trainer of an rrl run. The lines with `rrl`, `me` or `batch` concern rrl.

Environment (``[roles.trainer] env``): LOSS is TRL's ``loss_type``. LORA is the rank of a LoRA adapter, whose merged
weights are published; without it, all weights are trained.
"""

import copy
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import rrl

me = rrl.join()
model = AutoModelForCausalLM.from_pretrained(me.job.model.path, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(me.job.model.path)
lora = (
    LoraConfig(r=int(os.environ["LORA"]), lora_alpha=32, target_modules="all-linear") if "LORA" in os.environ else None
)


def main() -> None:
    """Train from the newest commit to the last step. A standby process has run the lines above, and waits here."""
    with me:  # with several ranks, Accelerate finds them in the environment
        sampling, share = me.job.sampling, (me.rank, me.world)
        committed, batches = me.committed_folder(share), me.batches(after=me.committed, share=share)

        def rollout(prompts: list[str], _: GRPOTrainer) -> dict[str, list]:
            """Return this rank's share of the next batch: prompts, answers and rewards of rrl's store, none of TRL."""
            batch = next(batches, None) or sys.exit()  # None: a stop was requested
            mine = batch.arrays
            starts, ends, middles = mine.starts[:-1], mine.starts[1:], mine.starts[:-1] + mine.prompt_lengths
            return {
                "prompt_ids": [mine.tokens[a:b].tolist() for a, b in zip(starts, middles, strict=True)],
                "completion_ids": [mine.tokens[a:b].tolist() for a, b in zip(middles, ends, strict=True)],
                "logprobs": [mine.logprobs[a:b].tolist() for a, b in zip(middles, ends, strict=True)],
                "rewards": mine.training.tolist(),
            }

        def publish() -> None:
            """Offer the weights to the rollouts, under the names of the model's files."""
            if me.rank == 0:
                weights = trainer.model if lora is None else copy.deepcopy(trainer.model).merge_and_unload()
                with me.phase("publish"):
                    me.publish(trainer.state.global_step, rrl.pack(dict(rrl.hf_tensors(weights))))

        class Commit(TrainerCallback):
            def on_save(self, args, state, *_, **__):
                """Move TRL's checkpoint of this step to where rrl keeps it, and commit the step."""
                trainer.accelerator.wait_for_everyone()  # until each rank has written its files
                if me.rank == 0:
                    with me.phase("checkpoint"):
                        folder = me.checkpoint_dir(state.global_step)
                        Path(args.output_dir, f"checkpoint-{state.global_step}").rename(folder)
                        numbers = {k: v for k, v in state.log_history[-1].items() if isinstance(v, int | float)}
                        me.commit(state.global_step, [folder], numbers)

        config = GRPOConfig(
            output_dir=str(me.run_dir.path / f"trl-{me.launch.incarnation.number}"),
            max_steps=me.job.steps,
            per_device_train_batch_size=sampling.prompts_per_step * sampling.group_size // me.world,
            num_generations=sampling.group_size,
            max_completion_length=sampling.max_new_tokens,
            temperature=sampling.temperature,
            learning_rate=me.job.trainer.learning_rate,
            lr_scheduler_type="constant",
            loss_type=os.environ.get("LOSS", "dapo"),
            seed=me.job.seed,
            save_steps=1,
            logging_steps=1,
            ignore_data_skip=True,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        rows = Dataset.from_list([{"prompt": ""}] * sampling.prompts_per_step * 1000)  # TRL begins again at their end
        parts = {"processing_class": tokenizer, "callbacks": [Commit()], "peft_config": lora, "rollout_func": rollout}
        trainer = GRPOTrainer(model, lambda rewards, **_: rewards, config, rows, **parts)
        # TRL corrects for the sampler's log-probabilities only if its sampler is vLLM. So rrl takes the place of TRL's
        # vLLM, which TRL asks for new weights before each batch. vllm_generation and _last_loaded_step are private.
        trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(sync_weights=publish)
        trainer._last_loaded_step = None
        with me.phase("train"):
            trainer.train(resume_from_checkpoint=committed and str(committed))
        publish()


if __name__ == "__main__":
    main()
