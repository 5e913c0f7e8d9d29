"""Run each reader in a process of its own with a deadline, because any reader may hang."""
