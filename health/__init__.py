"""Health of nodes and replicas: detection in the manager, checks on the nodes, and history across runs.

``detection`` judges heartbeats and loads; ``readers`` sample a node and ``checks`` judge the samples; ``history``
stores findings of all runs, and ``report`` evaluates them. Nothing is exported here: import from the sub-packages.
"""
