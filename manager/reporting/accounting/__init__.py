"""The use of a run's time and GPUs: effective training time, and the report of a whole run. Pure."""
