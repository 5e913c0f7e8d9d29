"""What a worker reports about itself: its phase, its progress, what it waits for, and how it uses its time."""
