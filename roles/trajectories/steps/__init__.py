"""Which groups a step trains, and until which step a group can be trained."""
