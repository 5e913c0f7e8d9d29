"""Start managers: check a job spec with Slurm, create the run directory, and submit the manager's jobs."""
