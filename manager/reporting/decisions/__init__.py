"""The manager's decisions, explained: their reasons, and whether what they expected came. Pure."""
