"""The OpenAI endpoint: a request becomes a turn of an episode, whose tokens are durable before the agent reads them."""
