"""Readers of a node: each reads one source (NVML, DCGM, kernel log, fabric, host) and returns samples."""
