"""The reader of DCGM: dcgm-exporter's metrics, ``dcgmi health`` and ``dcgmi diag``."""
