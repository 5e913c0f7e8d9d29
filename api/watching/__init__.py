"""Find the state of a run, and whether a process or job is left that can begin, continue or end it."""
