"""``rrl health``: node check, report and drain requests."""
