"""The command line: the commands and the views that they print. This package decides nothing about a run."""
