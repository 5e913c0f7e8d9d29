"""In-memory snapshots of the trainer's state, in its node's agent and in another node's, for a fast restart.

:class:`.server.SnapshotServer` runs in the agent, and :class:`.client.SnapshotClient` in each trainer member.
"""
