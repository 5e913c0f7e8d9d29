"""The template of an allocation's batch script, and :mod:`.render`, which fills it in."""
