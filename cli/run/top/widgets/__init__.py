"""Widgets of the screens of ``rrl top``."""
