"""Node checks: pure functions from a node's state and the rules to findings; ``evaluate.py`` runs them all."""
