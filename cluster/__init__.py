"""Clusters that a run can use: the interface (``base``), this machine (``local``) and Slurm (``slurm``)."""
