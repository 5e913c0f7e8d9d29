"""What enters the manager: messages, polls of the cluster, findings and user commands; all become events."""
