"""Failure detection: from heartbeats, loads and the scheduler's status to findings about replicas and nodes.

``health_monitor.HealthMonitor`` keeps the last observations, and ``detect.detect`` derives findings from them. The
package is pure: it does no I/O and reads no clock.
"""
