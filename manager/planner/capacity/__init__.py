"""Plan which nodes the run requests and where its replicas run: allocations, placement, rotation, standby processes."""
