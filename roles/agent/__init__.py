"""The node agent (``main.main``): sampling, orphan sweeps, exit witness, stack dumps, node checks, injected faults."""
