"""Start managers: create the run directory, submit the manager's jobs, and check beforehand what Slurm would accept."""
