"""vLLM as a rollout's engine: its configuration, its steps, and how weights are loaded into it."""
