"""Durable files of a run's managers: the journal, the epoch lease and the resume request."""
