"""Read the properties of a machine that roles need, for ``rrl doctor``.

``host.read_host`` reads this machine. ``main`` is a program that runs on a compute node and reports a
``main.NodeReport`` to the login node.
"""
