"""``rrl doctor``: collect facts about the host, Slurm and a compute node, and judge them."""
