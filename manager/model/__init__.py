"""The run's state, and the events and actions that change it.

``reducer.fold`` computes the :class:`State` from the events; ``queries`` answers common questions about it. Pure.
"""
