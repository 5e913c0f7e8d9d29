"""What a machine offers to roles, for ``rrl doctor``: ``host.read_host``, and ``main.NodeReport`` of a compute node."""
