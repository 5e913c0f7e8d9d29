"""Attribution: decide which replica, node or shared cause several related findings come from.

``gangs`` compares the members of a gang. ``wait_chains`` follows replicas that wait for each other. ``correlation``
looks for a cause that many nodes share. ``stack_groups`` compares the stacks of hung processes.
"""
