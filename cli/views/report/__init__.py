"""The report of a run as tables and as a page. The functions are pure."""
