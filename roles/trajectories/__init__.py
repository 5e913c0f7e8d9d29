"""The trajectory store: the process that stores all prompts, tokens and scores of a run and assigns them to steps.

:class:`.store.Store` implements its rules, :mod:`.server` serves it to other processes, and
:class:`.client.TrajectoryClient` is the client that these processes use.
"""
