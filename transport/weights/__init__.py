"""Pull-based, chunked, verified distribution of weight versions over TCP, UCX or NIXL.

Main entry points: ``WeightStore``, ``open_transport``, ``pull`` and ``Manifest``.
"""
