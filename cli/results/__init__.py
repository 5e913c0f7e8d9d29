"""Commands that give a user what a run has made."""
