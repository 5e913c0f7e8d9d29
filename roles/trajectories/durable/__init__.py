"""What survives a crash of the trajectory store: the records of its log, and the state that they describe."""
