"""Runs readers in processes of their own with deadlines, because any of them may hang."""
