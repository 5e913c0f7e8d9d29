"""The report of a run as tables and as a page. Pure."""
