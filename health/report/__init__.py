"""The health report of a site, from the histories of all runs: verdict, evidence and advice for each node."""
