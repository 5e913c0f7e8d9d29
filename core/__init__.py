"""Types and conventions that every package of rrl may import: names, the run spec, launch files, paths, log lines.

This package imports no other package of rrl.
"""
