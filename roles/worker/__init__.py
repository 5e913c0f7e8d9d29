"""The public worker API (``join``, ``Worker``) and the connection of a worker to the manager."""
