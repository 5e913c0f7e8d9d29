"""Collects the logs of roles whose nodes have no disk that is shared with the manager."""
