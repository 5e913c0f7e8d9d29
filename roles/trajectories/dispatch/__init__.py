"""Decides which rollout gets which work: expected lengths, token times, the order of leases, and moves.

Everything here is pure: it reads no clock, does no I/O and draws no random number. Times are passed in as values.
"""
