"""History of failures across runs: the files that runs write, a cache of these files, and failure rates."""
