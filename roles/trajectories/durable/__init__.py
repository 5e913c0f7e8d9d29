"""The durable part of the trajectory store: the records of its log, and the state that the records describe."""
