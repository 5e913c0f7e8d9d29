"""Reports of the manager about a run: summary, metrics, health history and logs.

Reporting observes events and never changes the state.
"""
