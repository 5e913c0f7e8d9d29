"""Detectors: pure functions that judge the view of one replica or node. ``registry`` lists them by precedence."""
