"""``rrl logs``: a run's logs merged by time, and its failures."""
