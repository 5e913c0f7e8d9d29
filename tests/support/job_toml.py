"""A small valid job.toml for tests."""

from __future__ import annotations

JOB = """\
[run]
name = "small"
steps = 10

[cluster]
kind = "local"
node = { cpus = 4, mem = "4GiB" }

[model.tokenizer]
pieces = "0123456789+= "

[task]
dataset = "chain_sum"
args = { min_terms = 2, seeds = [1, 2] }

[roles.rollout]
replicas = 2
env.FOO = "bar"

[[faults.planned]]
kind = "kill"
target = "rollout/0"
at = "step=5"
"""
