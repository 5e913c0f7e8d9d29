"""job.toml: its tables and their checks, and the run spec that is made from it.

:mod:`.load` reads a file, :mod:`.schema` declares it, :mod:`.resolve` makes the run spec, :mod:`.render` writes TOML.
"""
