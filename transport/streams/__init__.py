"""Connections that carry messages and bulk data in order: ``Connection``, ``UnixConnection``, ``receive_message``."""
