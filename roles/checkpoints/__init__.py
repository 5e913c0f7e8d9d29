"""Checkpoints as files: folders, manifests with digests, and the deletion of checkpoints that are no longer needed."""
