"""Page-locks the host memory that receives the state of a step, so that a GPU copies into it at the speed of PCIe.

One NVIDIA H200 (PCIe 5.0 x16, torch 2.11), 8.6 GB in 328 tensors, memory that is shared with the agent: a step waits
0.64 s for the copy into pageable memory, and 0.16 s for the copy into page-locked memory. Page-locking takes 0.40 s for
each buffer; for the agent's buffers this happens in the background of the first step.
"""

from __future__ import annotations

import logging
import threading

import torch

_log = logging.getLogger("rrl.trainer")

_CUDA_SUCCESS = 0


class PinnedMemory:
    """The memory that is page-locked in this process. Used only where the role has a GPU.

    Memory must be unpinned before it is unmapped: CUDA would otherwise take other memory at the same address for
    page-locked, and would copy into the pages of the old memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        """Number of bytes by address."""
        self._failed = False

    def pin(self, memory: memoryview) -> None:
        """Page-lock writable memory, unless it is page-locked already.

        If CUDA refuses, the memory stays pageable, and the first refusal is logged.
        """
        address = _address(memory)
        with self._lock:
            if self._sizes.get(address) == memory.nbytes:
                return
            self._unpin(address)
            code = int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0))  # type: ignore[no-untyped-call]
            if code == _CUDA_SUCCESS:
                self._sizes[address] = memory.nbytes
            elif not self._failed:
                self._failed = True
                _log.warning(
                    "CUDA cannot page-lock %.0f MB of host memory (cudaHostRegister: error %d): steps wait longer for"
                    " the copy of their state", memory.nbytes / 1e6, code,
                )  # fmt: skip

    def unpin(self, memory: memoryview) -> None:
        """Make memory pageable again, before it is unmapped."""
        with self._lock:
            self._unpin(_address(memory))

    def _unpin(self, address: int) -> None:
        if self._sizes.pop(address, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
