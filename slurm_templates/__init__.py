"""The template of an allocation's batch script, and the module :mod:`.render` that fills in its values."""
