"""Installed packages still have the private parts that the product uses, and the list of these parts is complete.

The ranges of versions in pyproject.toml have no upper bounds. If a new release lacks a part, these tests name the
module of the product that needs the part, before a user's run fails.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
OUTSIDE_THE_PRODUCT = {"tests", "benchmarks", "examples", "build"}
PUBLIC_BY_THEIR_DOCUMENTATION = {"os._exit", "torch._dynamo.config"}


class Part(NamedTuple):
    """A private part of another package, and the module of the product that uses it."""

    name: str
    used_in: str
    has: Callable[[Any], bool] = callable
    """A function that returns whether the part is still as ``used_in`` expects it."""


def takes(*parameters: str) -> Callable[[Any], bool]:
    """Return a function that checks whether its argument is a function with exactly these parameters."""
    return lambda function: list(inspect.signature(function).parameters) == list(parameters)


def names(*attributes: str) -> Callable[[Any], bool]:
    """Return a function that checks whether its argument has these attributes."""
    return lambda found: all(hasattr(found, name) for name in attributes)


PARTS = (
    Part(
        "submitit.slurm.slurm:SlurmExecutor._submitit_command_str",
        "manager/bootstrap/manager_job.py",
        lambda found: isinstance(found, property),
    ),
    Part(
        "submitit.local.local:LocalExecutor._submitit_command_str",
        "manager/bootstrap/start.py",
        lambda found: isinstance(found, property),
    ),
    Part("submitit.local._local", "manager/bootstrap/start_failure.py", inspect.ismodule),
    Part("ucxx._lib.libucxx:UCXContext", "transport/weights/ucx.py", names("info")),
    Part(
        "ucxx._lib.libucxx:UCXWorker",
        "transport/weights/ucx.py",
        names(
            "set_progress_thread_start_callback",
            "start_progress_thread",
            "stop_progress_thread",
            "stop_request_notifier_thread",
        ),
    ),
    Part(
        "ucxx._lib.libucxx:UCXAddress",
        "transport/weights/ucx.py",
        names("create_from_worker", "create_from_buffer", "tobytes"),
    ),
    Part(
        "ucxx._lib.libucxx:UCXEndpoint",
        "transport/weights/ucx.py",
        names("create_from_worker_address", "tag_send", "tag_recv", "raise_on_error"),
    ),
    Part("ucxx._lib.arr:Array", "transport/weights/ucx.py"),
    Part("ucxx._lib_async.continuous_ucx_progress:_create_context", "transport/weights/ucx.py", takes()),
    Part(
        "ucxx._lib_async.notifier_thread:_notifierThread",
        "transport/weights/ucx.py",
        takes("event_loop", "worker", "q"),
    ),
    Part("torch.distributed.tensor._utils:compute_local_shape_and_global_offset", "roles/models/tensors.py"),
    Part("transformers.models.qwen3.modeling_qwen3:Qwen3ForCausalLM._from_config", "roles/models/policy.py"),
    Part(
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory._registry",
        "roles/rollout/vllm/weight_transfer.py",
        lambda found: isinstance(found, dict),
    ),
)
INSTALLED = tuple(part for part in PARTS if find_spec(re.split(r"[.:]", part.name)[0]) is not None)
"""The parts whose packages are installed in this environment. vLLM has an environment of its own."""


def release(part: Part) -> str:
    package = re.split(r"[.:]", part.name)[0]
    for distribution in (package, f"{package}-cu13", f"{package}-cu12"):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return package


@pytest.mark.parametrize("part", INSTALLED, ids=lambda part: part.name)
def test_private_part_is_in_the_installed_release_as_the_product_uses_it(part: Part) -> None:
    module, _, path = part.name.partition(":")
    try:
        found: Any = reduce(getattr, path.split(".") if path else (), importlib.import_module(module))
    except (ImportError, AttributeError):
        found = None
    fits = found is not None and part.has(found)
    assert fits, f"{release(part)} no longer has {part.name} as {part.used_in} uses it: adapt that file"


def test_submitit_and_ucxx_are_installed_where_the_tests_run() -> None:
    assert {re.split(r"[.:]", part.name)[0] for part in INSTALLED} >= {"submitit", "ucxx", "torch", "transformers"}


def test_a_part_that_is_gone_is_reported_with_the_place_that_uses_it() -> None:
    gone = Part("submitit.slurm.slurm:SlurmExecutor._gone", "manager/bootstrap/manager_job.py")
    with pytest.raises(AssertionError, match=r"submitit .* no longer has .*_gone as manager/bootstrap/manager_job.py"):
        test_private_part_is_in_the_installed_release_as_the_product_uses_it(gone)


def test_files_of_submitit_have_the_names_under_which_the_product_looks_for_them(tmp_path: Path) -> None:
    """submitit's files have the names ``ID_submitted*`` and ``ID_0_log.err``.

    start_failure.py and manager_job.py in manager/bootstrap look for files of these names.
    """
    from submitit.core.utils import JobPaths

    paths = JobPaths(tmp_path, "77", 0)
    assert re.fullmatch(r"77_submitted.*", paths.submitted_pickle.name)
    assert (paths.stderr.name, paths.stdout.name) == ("77_0_log.err", "77_0_log.out")


# ── completeness of the list ─────────────────────────────────────────────────────────────────────────────────────────
def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield each private name of another package that a module imports or reads from an imported object."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {one.asname or one.name.partition(".")[0]: one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
            for one in node.names:
                name = f"{node.module}.{one.name}"
                imported[one.asname or one.name] = name
                if is_private(name):
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            path, base = [node.attr], node.value
            while isinstance(base, ast.Attribute):
                path, base = [base.attr, *path], base.value
            if isinstance(base, ast.Name) and base.id in imported:
                yield ".".join([imported[base.id], *path])


def is_private(name: str) -> bool:
    return any(re.match(r"_(?!_)", part) for part in name.split("."))


def test_every_private_part_that_the_product_uses_is_listed() -> None:
    listed = {(part.name.replace(":", "."), part.used_in) for part in PARTS}
    tops = [top for top in ROOT.iterdir() if top.name not in OUTSIDE_THE_PRODUCT and not top.name.startswith(".")]
    places = [path for top in tops for path in (top.rglob("*.py") if top.is_dir() else [top]) if path.suffix == ".py"]
    used = {
        (name, str(path.relative_to(ROOT)))
        for path in places
        for name in private_names(ast.parse(path.read_text()))
        if not name.startswith(tuple(PUBLIC_BY_THEIR_DOCUMENTATION)) and name != "torch._dynamo"
    }
    assert len(used) >= 10
    unlisted = used - listed
    assert not unlisted
    for part in PARTS:
        named = (ROOT / part.used_in).read_text()
        assert re.split(r"[.:]", part.name)[-1] in named, f"{part.used_in} no longer uses {part.name}"
