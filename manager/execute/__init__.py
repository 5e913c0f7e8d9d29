"""Carry out the planner's external actions: requests to the cluster, launches, stops and injected faults."""
