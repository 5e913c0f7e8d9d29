"""Reads for ``rrl doctor`` what a machine offers to roles.

``host.read_host`` reads the present machine. ``main`` is a program that runs on a compute node and reports a
``main.NodeReport`` to the login node.
"""
