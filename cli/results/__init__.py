"""Commands that read what a run leaves behind."""
