"""The screens of ``rrl top``, one class in each module."""
