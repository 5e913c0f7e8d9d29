"""Types and conventions that every package of rrl may import: names, the run spec, launch files, paths, log lines.

This package imports nothing else of rrl and exports nothing itself; import its modules.
"""
