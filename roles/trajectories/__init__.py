"""The trajectory store: the process that stores every prompt, token and score of a run, and trains each exactly once.

:class:`.store.Store` implements its rules, :mod:`.server` serves it to other processes, and
:class:`.client.TrajectoryClient` is how they use it.
"""
