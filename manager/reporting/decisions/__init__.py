"""Explanations of the manager's decisions: their reasons, and whether their expected effects occurred. Pure."""
