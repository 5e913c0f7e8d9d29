"""Code that several commands share: finding runs, sending commands to a manager, output."""
