"""How the processes of a run communicate: control messages (:mod:`.control`), streams (:mod:`.streams`), weights.

The modules at this level are shared by all three: addresses, keys, messages and the inspection of TCP connections.
"""
