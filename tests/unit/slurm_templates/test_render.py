"""The text of an allocation's script: equal to a stored file, refused for invalid values, and accepted by sbatch."""

from __future__ import annotations

import pytest

from rrl.core.types import Resources
from rrl.slurm_templates.render import allocation_options, allocation_script
from rrl.tests.support.slurm.lab import SlurmLab

NODE = Resources(cpus=4, gpus=2, mem=2 * 2**30)

GOLDEN = """\
#!/bin/sh
#SBATCH --job-name=run.more-7
#SBATCH --comment="rrl run replacement run.more-7"
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=2048M
#SBATCH --gres=gpu:2
#SBATCH --time=1-12:00:01
#SBATCH --no-kill
#SBATCH --exclude=n[4,9]
#SBATCH --exclusive
#SBATCH --partition=main
#SBATCH --no-requeue
#SBATCH --chdir=/
#SBATCH --output=/dev/null
# This script only holds the nodes. The manager, outside of this job, starts every step in it.
# Where Slurm's InactiveLimit is 0, `salloc --no-shell` holds them instead, with the options above.
exec sleep infinity
"""


def options(**extra: str) -> tuple[str, ...]:
    return allocation_options(
        tag="run.pool",
        comment="rrl run run.pool",
        nodes=2,
        node=NODE,
        walltime=3600,
        exclude=("n4",),
        extra={name.replace("_", "-"): value for name, value in extra.items()},
    )


def test_allocation_script_equals_the_stored_text() -> None:
    made = allocation_options(
        tag="run.more-7",
        comment="rrl run replacement run.more-7",
        nodes=3,
        node=NODE,
        walltime=129600.5,
        exclude=("n9", "n4"),
        extra={"partition": "main", "exclusive": ""},
    )
    assert allocation_script(made) == GOLDEN


HETJOB = """\
#!/bin/sh
#SBATCH --job-name=run.rollout
#SBATCH --comment="rrl run run.rollout"
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=2048M
#SBATCH --gres=gpu:2
#SBATCH --time=0-01:00:00
#SBATCH --no-kill
#SBATCH --partition=spot
#SBATCH --no-requeue
#SBATCH --chdir=/
#SBATCH --output=/dev/null
#SBATCH hetjob
#SBATCH --job-name=run.trainer
#SBATCH --comment="rrl run run.trainer"
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=0-01:00:00
#SBATCH --no-kill
#SBATCH --no-requeue
# This script only holds the nodes. The manager, outside of this job, starts every step in it.
# Where Slurm's InactiveLimit is 0, `salloc --no-shell` holds them instead, with the options above.
exec sleep infinity
"""


def component(name: str, nodes: int, node: Resources, **extra: str) -> tuple[str, ...]:
    return allocation_options(
        tag=f"run.{name}", comment=f"rrl run run.{name}", nodes=nodes, node=node, walltime=3600, extra=extra
    )


def test_heterogeneous_script_has_its_components_in_order_each_with_its_own_name() -> None:
    components = component("rollout", 6, NODE, partition="spot"), component("trainer", 2, Resources(cpus=16))
    assert allocation_script(*components) == HETJOB


def test_pool_script_with_manager_ends_with_the_manager() -> None:
    text = allocation_script(options(output="/runs/a b/pool.log"), command=("python", "-m", "x", "/runs/a b"))
    assert text.endswith(
        "\n# The manager runs on the first of these nodes, and starts every step in this job.\n"
        "exec python -m x '/runs/a b'\n"
    )
    assert '#SBATCH --output="/runs/a b/pool.log"\n' in text


@pytest.mark.parametrize("name", ["job-name", "nodes", "no-kill", "requeue", "array", "wrap", "mem", "time"])
def test_an_option_that_rrl_sets_cannot_be_passed_on(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is reserved"):
        options(**{name: "1"})


@pytest.mark.parametrize(("name", "value"), [("p", "main"), ("-p", "main"), ("par tition", "x"), ("account", "a\nb")])
def test_option_that_does_not_fit_into_a_line_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"not the long name|non-printable"):
        options(**{name: value})


def test_typed_gpus_replace_the_default_request_and_excluded_nodes_add_up() -> None:
    made = options(gres="gpu:a100:2", exclude="n[7-8]")
    assert [option for option in made if "gres" in option] == ["--gres=gpu:a100:2"]
    assert [option for option in made if "exclude" in option] == ["--exclude=n[4,7-8]"]


def test_output_given_by_the_user_replaces_the_default() -> None:
    text = allocation_script(options(output="/tmp/pool.log"))
    assert "--output=/tmp/pool.log" in text
    assert "/dev/null" not in text


@pytest.mark.slurm
def test_real_sbatch_accepts_each_form_from_a_plain_user(slurm_lab: SlurmLab) -> None:
    small = Resources(cpus=1, gpus=1, mem=2**28)
    forms = {
        "pool": allocation_script(component("pool", 3, small)),
        "replica": allocation_script(component("rollout-0", 1, small, partition="main")),
        "hetjob": allocation_script(component("rollout", 2, small), component("trainer", 2, Resources(cpus=2))),
    }
    for form, text in forms.items():
        script = slurm_lab.user_home / f"{form}.sh"
        script.write_text(text)
        script.chmod(0o644)
        assert "to start at" in slurm_lab.run_as_user(["sbatch", "--test-only", str(script)]).stderr


@pytest.mark.slurm
def test_real_sbatch_parses_every_line_as_intended(slurm_lab: SlurmLab) -> None:
    comment = r"""a "b" \ # $HOME 'c' | é"""
    made = allocation_options(
        tag="run.pool",
        comment=comment,
        nodes=2,
        node=Resources(3, 1, 2**30),
        walltime=120,
        exclude=("n1",),
        extra={"partition": "main", "nice": "100"},
    )
    script = slurm_lab.user_home / "pool.sh"
    script.write_text(allocation_script(made))
    script.chmod(0o644)
    tested = slurm_lab.run_as_user(["sbatch", "--test-only", str(script)])
    assert "to start at" in tested.stderr
    job = slurm_lab.run_as_user(["sbatch", "--parsable", "--hold", str(script)]).stdout.strip()
    shown = slurm_lab.slurm("scontrol", "show", "job", "-o", job)
    held = slurm_lab.slurm("squeue", "-h", "-j", job, "-o", "%j|%l|%x|%D|%c|%m|%k")
    slurm_lab.clear()
    assert held == f"run.pool|2:00|n1|2|3|1G|{comment}\n"
    shown = shown.replace("gres:gpu", "gres/gpu")  # as Slurm 24.11 and later print it
    for words in ("Requeue=0", "TresPerNode=gres/gpu:1", "StdOut=/dev/null", "WorkDir=/ "):
        assert words in shown
