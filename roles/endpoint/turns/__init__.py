"""The turns of an episode as the endpoint sees them: what is known of them, and where the next one begins."""
