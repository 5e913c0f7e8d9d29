"""Notifications of a run: which are due, the claim that keeps each from being sent twice, and the sending.

Notifications observe the state and never change it.
"""
