"""The operations on runs, which the Python API (:mod:`rrl.api.run`) and the commands use. No function here prints."""
