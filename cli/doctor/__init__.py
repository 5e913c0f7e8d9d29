"""``rrl doctor``: collects facts about host, Slurm and a compute node, and judges them."""
