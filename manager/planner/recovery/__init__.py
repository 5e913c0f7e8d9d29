"""What to do about a failure: the repair ladder, the classes of failures, and the exclusion of nodes."""
