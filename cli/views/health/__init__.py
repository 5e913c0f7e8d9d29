"""The health report as a page."""
