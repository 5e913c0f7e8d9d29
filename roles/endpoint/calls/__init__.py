"""Parse and check requests to the endpoint, and describe the errors that it answers with."""
