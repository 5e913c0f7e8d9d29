"""Replies to calls as OpenAI's objects: whole, or as streams of events."""
