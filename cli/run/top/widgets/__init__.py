"""Widgets that screens of ``rrl top`` consist of."""
