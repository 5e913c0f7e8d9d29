"""The command line: commands and views, which decide nothing."""
