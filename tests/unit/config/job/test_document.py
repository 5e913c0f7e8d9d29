"""Files and settings of a job spec are merged from left to right.

An error message about a key names the file and line in which the key was written.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.config.job.document import JobDocument, SpecError, parse_setting, typed_setting
from rrl.config.job.load import job_from
from rrl.config.job.render import merged_toml
from rrl.tests.support.examples import examples
from rrl.tests.support.job_toml import JOB


def document(folder: Path, *texts: str, settings: tuple[str, ...] = ()) -> JobDocument:
    files = [folder / f"{index}.toml" for index in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    return JobDocument(files, [parse_setting(setting) for setting in settings])


def complaints(given_document: JobDocument) -> list[str]:
    with pytest.raises(SpecError) as raised:
        job_from(given_document)
    return str(raised.value).replace(f"{given_document.source.parent}/", "").splitlines()


def test_tables_are_merged_and_other_values_replaced(tmp_path: Path) -> None:
    merged = document(
        tmp_path,
        JOB,
        "[roles.rollout]\nenv.BAR = 'b'\n[task.args]\nseeds = [3]\n",
        settings=("roles.rollout.env.FOO=x",),
    )
    assert merged.data["roles"]["rollout"] == {"replicas": 2, "env": {"FOO": "x", "BAR": "b"}}
    assert merged.data["task"]["args"] == {"min_terms": 2, "seeds": [3]}


def test_the_last_of_several_settings_of_a_key_counts(tmp_path: Path) -> None:
    merged = document(tmp_path, JOB, settings=("run.steps=5", "run={steps=6}", "run.steps=7"))
    assert merged.data["run"] == {"name": "small", "steps": 7}


def test_array_of_tables_is_replaced_as_a_whole(tmp_path: Path) -> None:
    later = "[[faults.planned]]\nkind = 'freeze'\nat = 'step=1'\n"
    assert document(tmp_path, JOB, later).data["faults"]["planned"] == [{"kind": "freeze", "at": "step=1"}]


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("roles.trainer.learning_rate=1e-6", ("roles", "trainer", "learning_rate"), 1e-6),
        ("run.steps = 500", ("run", "steps"), 500),
        ("cluster.walltime=8h", ("cluster", "walltime"), "8h"),
        ("slurm.time=08:00:00", ("slurm", "time"), "08:00:00"),
        ("slurm.begin=2026-11-20", ("slurm", "begin"), "2026-11-20"),
        ('run.name="quick"', ("run", "name"), "quick"),
        ("run.name=quick", ("run", "name"), "quick"),
        ("roles.trainer.warm=false", ("roles", "trainer", "warm"), False),
        ('env.passed=["A", "B"]', ("env", "passed"), ["A", "B"]),
        ("task.args={ n = 2 }", ("task", "args"), {"n": 2}),
        ("roles.rollout.env.X=a=b", ("roles", "rollout", "env", "X"), "a=b"),
        ('phases."a=b".longest=3s', ("phases", "a=b", "longest"), "3s"),
        ("task.prompt=5\nx=1", ("task", "prompt"), "5\nx=1"),
        ('health.metrics=""', ("health", "metrics"), ""),
    ],
)
def test_value_of_a_setting_is_toml_or_text(setting: str, key: tuple[str, ...], value: Any) -> None:
    parsed = parse_setting(setting)
    assert (parsed.key, parsed.value) == (key, value)
    assert type(parsed.value) is type(value)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("run.steps", "has no value; write for example --set run.steps=500"),
        ("=5", "is not a key of job.toml; write for example --set run.steps=500"),
        ("a..b=5", "is not a key of job.toml; write for example --set run.steps=500"),
        ("a b=5", "is not a key of job.toml; write for example --set run.steps=500"),
        ("run.name=", "has no value; for an empty text write '\"\"', quoted for the shell"),
        ("env.passed=[A]", "not valid TOML: Invalid value (at line 1, column 10); put the setting in single quotes,"),
    ],
)
def test_setting_that_cannot_be_read_is_refused(setting: str, complaint: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_setting(setting)
    assert str(raised.value).startswith(f"--set {setting}: {complaint}")


@pytest.mark.parametrize(
    ("texts", "settings", "expected"),
    [
        (
            (JOB, "\n[roles.rollout]\nreplica = 3\n"),
            (),
            ['1.toml:3: roles.rollout.replica: unknown key; did you mean "replicas"?'],
        ),
        (
            (JOB.replace("steps = 10", "steps = 0"), "[run]\nseed = 1\n"),
            (),
            ["0.toml:3: run.steps: must be at least 1, not 0"],
        ),
        (
            (JOB.replace("steps = 10", "steps = 0"), "[run]\nsteps = -1\n"),
            (),
            ["1.toml:2: run.steps: must be at least 1, not -1"],
        ),
        (
            (JOB, "[roles.rollout]\nreplicas = -1\n"),
            ("roles.trainer.learning_rat=3", "run.steps=x"),
            [
                "1.toml:2: roles.rollout.replicas: must be at least 0, not -1",
                '--set roles.trainer.learning_rat=3: unknown key; did you mean "learning_rate"?',
                '--set run.steps=x: must be a whole number, not "x"',
            ],
        ),
        (
            ("[run]\nsteps = 5\n" + JOB.partition("\n\n")[2], "[run]\nseed = 2\n"),
            ("run.steps=7",),
            ["0.toml:1: run.name: missing; add name = ... in [run] (a letter, then up to 30 lower-case letters,"],
        ),
        (
            (JOB,),
            ("task.args={}", "faults={planned=[{kind='kill', at='step=x'}]}"),
            ["--set faults={planned=[{kind='kill', at='step=x'}]}: faults.planned[0].at: "],
        ),
        (
            (JOB,),
            ("run.name=7",),
            ["--set run.name=7: must be text in quotes, not 7; the shell removes quotes: write --set 'run.name=\"7\"'"],
        ),
        ((JOB,), ("limits.heartbeat=60s",), ['--set limits.heartbeat=60s: limits.silence: "10s" is less than three']),
        ((JOB,), ("run=3",), ["--set run=3: must be a table, not 3"]),
        (("", "[cluster]\nspares = 0\n"), (), ["0.toml + 1.toml: run: missing; add a table [run] with name"]),
    ],
)
def test_error_names_the_file_and_line_or_the_setting(
    tmp_path: Path, texts: tuple[str, ...], settings: tuple[str, ...], expected: list[str]
) -> None:
    found = complaints(document(tmp_path, *texts, settings=settings))
    assert len(found) >= len(expected)
    for line, start in zip(found, expected, strict=False):
        assert line.startswith(start)


def test_missing_file_that_looks_like_a_setting_is_answered_with_the_option(tmp_path: Path) -> None:
    for word in ("run.steps=5", "+run.steps=5", "~run.steps=5"):
        with pytest.raises(SpecError, match=r"no such file; to set a key, write --set run\.steps=5$"):
            JobDocument([Path(word)])
    with pytest.raises(SpecError, match=r"no such file$"):
        JobDocument([tmp_path / "missing.toml"])


def test_too_deeply_nested_tables_are_refused(tmp_path: Path) -> None:
    deep = ".".join(["a"] * 2000) + " = 1\n"
    with pytest.raises(SpecError, match="nested"):
        job_from(document(tmp_path, deep, deep))
    with pytest.raises(SpecError, match="nested"):
        job_from(document(tmp_path, JOB, settings=(deep.strip(),)))


_KEYS = st.text(min_size=1, max_size=4)
_SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_VALUES = st.recursive(
    _SCALARS | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@examples(few=60, many=3000)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), _VALUES, max_size=4))
def test_merged_text_reads_back_unchanged(data: dict[str, Any]) -> None:
    data = tomllib.loads(merged_toml(data)) if data else {}
    assert tomllib.loads(merged_toml(data)) == data


# ── text and Python values ─────────────────────────────────────────────────────────────────────────────────────────
def test_text_and_tables_are_merged_with_files_and_kept_as_one_toml_file(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    more: dict[str, Any] = {"task": {"args": {"seeds": (3,)}}, "model": {"path": Path("/models/x")}}
    merged = JobDocument(
        [tmp_path / "job.toml", "[run]\r\nsteps = 11\r\n", more], [typed_setting("roles.rollout.env.FOO", "1e-6")]
    )
    assert (merged.file, merged.data["run"]["steps"]) == (tmp_path / "job.toml", 11)
    assert (merged.data["task"]["args"]["seeds"], merged.data["model"]["path"]) == ([3], "/models/x")
    assert merged.data["roles"]["rollout"]["env"] == {"FOO": "1e-6"}, "a Python string was changed"
    assert tomllib.loads(merged.text()) == merged.data
    assert merged.name == f'{tmp_path}/job.toml + job[1] + job[2] + set["roles.rollout.env.FOO"]'


def test_single_text_is_kept_as_given() -> None:
    merged = JobDocument([f"# why\n{JOB}"])
    assert (merged.text(), merged.file, merged.source) == (f"# why\n{JOB}", None, Path("job.toml"))


def test_errors_in_text_and_tables_name_the_argument_in_the_order_of_the_parts() -> None:
    merged = JobDocument([f"{JOB}[roles.reward]\nx = 1\n", {"run": {"stepz": 1}}], [typed_setting("run.seed", "x")])
    assert complaints(merged) == [
        "job[0]:25: roles.reward.x: unknown key; known here: " + complaints(merged)[0].partition("known here: ")[2],
        'job[1]: run.stepz: unknown key; did you mean "steps"?',
        'set["run.seed"]: must be a whole number, not "x"',
    ]


def test_given_table_is_never_changed() -> None:
    table: dict[str, Any] = {"run": {"name": "a"}}
    merged = JobDocument([table, "[run]\nname = 'b'\n"], [typed_setting("run.steps", 3)])
    assert (merged.data["run"], table) == ({"name": "b", "steps": 3}, {"run": {"name": "a"}})
