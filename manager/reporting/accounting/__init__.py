"""What a run's time and GPUs were spent on: effective training time, and the report of a whole run. Pure."""
