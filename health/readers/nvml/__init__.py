"""The reader of NVML: all GPUs of the node, and their Xids."""
