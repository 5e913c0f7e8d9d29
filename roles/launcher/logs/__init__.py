"""The log of a role: rate limit, timestamps and rotation of its file."""
