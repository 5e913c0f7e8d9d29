"""Find out which notifications of a run are due, claim each so that it is not sent twice, and send it.

Notifications observe the state and never change it.
"""
