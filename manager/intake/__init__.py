"""Turn all input of the manager into events: messages, polls of the cluster, findings and user commands."""
