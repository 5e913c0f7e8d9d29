"""Installs the double of a GPU in each process whose PYTHONPATH names this folder (rrl.tests.support.fake_gpu)."""

from rrl.tests.support import fake_gpu

fake_gpu.install()
