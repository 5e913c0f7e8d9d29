"""Node checks: pure functions from a node's state and the rules to problems.

:mod:`rrl.health.checks.evaluate` runs all checks and turns their problems into findings.
"""
