"""History of failures across runs: the files that runs write, a cache of them, and rates."""
