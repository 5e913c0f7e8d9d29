"""Send the steps of a run to experiment trackers, each tracker by a process of its own that follows the journal."""
