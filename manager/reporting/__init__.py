"""What the manager reports about a run: summary, metrics, health history and logs.

Reporting observes events and never changes the state.
"""
