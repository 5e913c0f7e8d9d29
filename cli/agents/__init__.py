"""Commands about agents: the endpoint for those outside of the run, the relay beside them, and their episodes."""
