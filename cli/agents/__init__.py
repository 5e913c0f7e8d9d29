"""Commands about agents: the endpoint and the relay for agents outside of the run, and the episodes of agents."""
