"""The health report of a site: what the histories of all runs say about each node."""
