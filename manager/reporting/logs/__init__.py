"""Collects the newest log lines of every incarnation in the manager, in case its log file is lost with its node."""
