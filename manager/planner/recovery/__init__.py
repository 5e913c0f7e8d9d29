"""What to do about a failure: the repair ladder, faults of software, rejection of a job, and the exclusion of nodes."""
