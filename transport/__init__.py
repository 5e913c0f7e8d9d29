"""Communication between the processes of a run: control messages, streams and weights.

The packages :mod:`.control`, :mod:`.streams` and :mod:`.weights` share the modules at this level: addresses, keys,
messages and the inspection of TCP connections.
"""
