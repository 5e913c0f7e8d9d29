"""Compare a job with this machine before it is submitted."""
