"""The figures of a run as parts of its state: rewards, ages of tokens, idle times, effective training time. Pure."""
