"""The role ``agents``: it runs the user's agents, each for one episode, and serves them an OpenAI endpoint."""
