"""How the GPUs of a trainer's node pass between the trainer and a guest; shared by both."""
