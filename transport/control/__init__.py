"""Authenticated messages between the manager and all other processes: ``Listener`` and ``Dialer``."""
