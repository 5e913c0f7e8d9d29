"""Views: state and results as text, tables and HTML. Views do no I/O and make no decisions."""
