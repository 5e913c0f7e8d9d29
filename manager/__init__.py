"""The program that manages one run: its state, planning, inputs, external actions and reports.

:class:`rrl.manager.runtime.Manager` connects the sub-packages.
"""
