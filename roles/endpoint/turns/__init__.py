"""The turns of an episode in the endpoint: a cache of them, requests to the store, and the context of the next turn."""
