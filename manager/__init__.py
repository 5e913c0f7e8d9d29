"""The manager of a run: decides what runs where, replaces what fails, and is the only writer of the run's journal.

``runtime.Manager`` ties the sub-packages together: ``model`` (state and events), ``planner`` (decisions), ``intake``
(messages, polls and commands become events), ``execute`` (actions are carried out), ``storage``, ``cluster``,
``bootstrap`` and ``reporting``.
"""
