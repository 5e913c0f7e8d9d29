"""The OpenAI endpoint. A request becomes a turn of an episode; its tokens are durable before the agent reads them."""
