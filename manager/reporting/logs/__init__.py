"""Collects the newest log lines of every incarnation in the manager.

The log file of an incarnation may be lost with the incarnation's node.
"""
