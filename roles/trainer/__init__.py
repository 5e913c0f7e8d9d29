"""The built-in trainer: GRPO on one process or on a gang, with asynchronous checkpoints and in-memory snapshots.

:mod:`.main` is the process; :class:`.learner.Learner` is the training step without a run.
"""
