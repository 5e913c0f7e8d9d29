"""Health of nodes and replicas: detection in the manager, checks on the nodes, and history across runs.

``detection`` runs in the manager and finds failures from heartbeats and load samples. ``readers`` sample a node, and
``checks`` derive the node's problems from the samples. ``history`` stores findings of all runs, and ``report``
evaluates them.
"""
