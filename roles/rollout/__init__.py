"""The built-in rollout: it samples trajectories with an engine, :class:`.engine.Engine`, in plain torch or in vLLM."""
