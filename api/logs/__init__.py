"""Find and merge the logs of a run."""
