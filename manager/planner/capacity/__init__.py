"""Plan which nodes the run has and which replica runs where: allocations, placement, rotation, standby processes."""
