"""The Slurm cluster, operated through Slurm's commands. The manager uses ``cluster.SlurmCluster``."""
