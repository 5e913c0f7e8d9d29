"""Requests to the endpoint as checked values, and the errors that it answers with."""
