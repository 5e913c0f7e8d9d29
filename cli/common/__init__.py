"""What several commands share: finding runs, sending commands to a manager, output."""
