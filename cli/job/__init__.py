"""``rrl check`` and ``rrl init``: commands about a job spec."""
