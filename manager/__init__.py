"""The manager of a run: decides what runs where, replaces what fails, and is the only writer of the run's journal.

``runtime.Manager`` ties the sub-packages together: ``model`` (state and events), ``planner`` (decisions), ``intake``
(what comes in), ``execute`` (what goes out), ``storage``, ``cluster``, ``bootstrap`` and ``reporting``.
"""
