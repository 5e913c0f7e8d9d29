"""Commands about a run: submit, status, resume, cancel, restart, drain, inject."""
