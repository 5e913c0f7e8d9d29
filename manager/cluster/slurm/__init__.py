"""The Slurm cluster, operated through Slurm's commands. ``cluster.SlurmCluster`` is what the manager uses."""
