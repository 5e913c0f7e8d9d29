"""Decide what to do about a failure: the repair ladder, software faults, rejection of a job, exclusion of nodes."""
