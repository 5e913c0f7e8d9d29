"""The operations on runs, for the Python API (:mod:`rrl.api.run`) and for the commands: nothing here prints."""
