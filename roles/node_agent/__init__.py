"""The node agent (``main.main``): samples and checks the node, reports ended steps, and kills orphaned processes."""
