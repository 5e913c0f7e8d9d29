"""Episodes of agents: their attempts, their turns, and the requests about them."""
