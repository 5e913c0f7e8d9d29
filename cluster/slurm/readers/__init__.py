"""Readers of Slurm: what the manager reads of jobs, steps and nodes, by Slurm's commands or by pyslurm."""
