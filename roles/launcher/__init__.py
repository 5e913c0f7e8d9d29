"""The first process of every step (``step.main``): admission, environment, the command's process group and its log."""
