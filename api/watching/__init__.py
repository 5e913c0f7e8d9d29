"""Where a run stands, and whether anything is left that can begin, continue or end it."""
