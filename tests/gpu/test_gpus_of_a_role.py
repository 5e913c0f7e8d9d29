"""The GPUs of a role are the same by NVML, by CUDA and in the launcher's report to the manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rrl.roles.launcher.environment import GPUS_ENV
from rrl.roles.launcher.gpus import assigned_gpus

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.gpu


def uuid_of(nvml: Any, index: int) -> str:
    return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))


def test_assigned_gpus_are_named_by_uuid_whether_given_as_numbers_or_uuids(nvml: Any) -> None:
    count = nvml.nvmlDeviceGetCount()
    uuids = tuple(sorted(uuid_of(nvml, index) for index in range(count)))
    numbers = ",".join(map(str, range(count)))
    assert assigned_gpus({GPUS_ENV: numbers, "CUDA_VISIBLE_DEVICES": numbers}) == uuids
    assert assigned_gpus({GPUS_ENV: numbers, "CUDA_VISIBLE_DEVICES": ",".join(uuids)}) == uuids
    assert assigned_gpus({"CUDA_VISIBLE_DEVICES": numbers}) == (), "GPUs were found although Slurm has assigned none"
    assert assigned_gpus({GPUS_ENV: str(count), "CUDA_VISIBLE_DEVICES": str(count)}) == (str(count),), (
        "the number of a GPU that does not exist was changed"
    )


def test_torch_computes_on_the_gpu_that_the_launcher_reports(nvml: Any, device: torch.device) -> None:
    """CUDA may number GPUs of several kinds by speed (CUDA_DEVICE_ORDER), and NVML numbers them by their place on the
    bus."""
    import torch

    if device.type != "cuda":
        pytest.skip("in a rehearsal torch has no GPU")
    for index in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is None:
            pytest.skip(f"torch {torch.__version__} does not report the UUID of a GPU")
        (reported,) = assigned_gpus({GPUS_ENV: str(index), "CUDA_VISIBLE_DEVICES": str(index)})
        assert reported.removeprefix("GPU-") == str(uuid).removeprefix("GPU-")
