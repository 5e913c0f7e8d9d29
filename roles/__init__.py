"""The processes of a run besides the manager: launchers, agents, and the built-in RL roles on the worker API."""
