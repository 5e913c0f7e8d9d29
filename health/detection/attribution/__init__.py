"""Attribution: decide which replica, node or shared cause is to blame when several findings belong together.

``gangs`` compares the members of a gang, ``wait_chains`` follows replicas that wait for each other, ``correlation``
looks for a cause shared by many nodes, and ``stack_groups`` compares the stacks of hung processes.
"""
