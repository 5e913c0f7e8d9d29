from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rrl.core.run_dir import Attempt, RunDir, attempt_of
from rrl.core.shares import checked_share
from rrl.roles.checkpoints.folders import (
    LINKS,
    DamagedCheckpoint,
    as_paths,
    describe,
    exact_folder,
    fresh_folder,
    share_of,
    verified,
)

NAMES = ["meta.json", "model/a.distcp", "model/deep/er/a.distcp", "optimizer/a.distcp"]
"""Files of a tree in which a bare name occurs three times."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@pytest.fixture
def folder(run: RunDir) -> Path:
    return _write(fresh_folder(run.checkpoints, 3, 1), *NAMES)


def _write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.fsencode(name))
    return folder


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def test_each_attempt_has_a_folder_whose_name_states_step_and_incarnation(tmp_path: Path) -> None:
    folders = [fresh_folder(tmp_path, 3, incarnation) for incarnation in (1, 1, 2)]
    assert len(set(folders)) == 3
    assert [attempt_of(folder.name) for folder in folders] == [Attempt(3, 1, 0), Attempt(3, 1, 1), Attempt(3, 2, 0)]


def test_foreign_name_states_no_attempt() -> None:
    assert [attempt_of(name) for name in ("step-3", "lost+found", "step-3.x.0", "mine.1.2")] == [None] * 4


@pytest.mark.parametrize("files", ["state.pt", b"state.pt", Path("state.pt"), None, 3])
def test_files_of_a_checkpoint_that_are_not_a_list_are_refused(files: object) -> None:
    with pytest.raises(TypeError, match="files must be a list of paths, not "):
        as_paths(files)


@pytest.mark.parametrize("file", [None, b"state.pt", ["state.pt"], "a\0b"])
def test_file_of_a_checkpoint_that_is_no_path_is_refused(file: object) -> None:
    with pytest.raises(TypeError, match=r"me\.commit\(step, files\): .* is not a path"):
        as_paths([file])


def test_paths_of_checkpoint_files_may_be_strings() -> None:
    assert as_paths(["a/state.pt"]) == [Path("a/state.pt")]


# ── the manifest of a tree ─────────────────────────────────────────────────────────────────────────────────────────
def test_manifest_names_the_files_of_a_tree_by_relative_path(run: RunDir, folder: Path) -> None:
    (folder / "empty").mkdir()
    manifest = describe(run.path, [folder])
    assert manifest["folder"] == "checkpoints/step-3.1.0"
    assert list(manifest["files"]) == NAMES
    assert [digest["bytes"] for digest in manifest["files"].values()] == [len(name) for name in NAMES]
    assert describe(run.path, [folder / "meta.json", folder / "model", folder / NAMES[3]]) == manifest
    assert list(describe(run.path, [folder / "model" / "deep"])["files"]) == ["model/deep/er/a.distcp"]
    assert verified(run.path, manifest) == {name: folder / name for name in NAMES}


def test_known_digests_are_taken_by_relative_path_and_their_files_are_not_read(run: RunDir, folder: Path) -> None:
    known = {name: {"sha256": "00", "bytes": 3} for name in ("model/a.distcp", "model/of-another-rank")}
    files = describe(run.path, [folder, folder / "model/of-another-rank"], known)["files"]
    assert {name for name in files if files[name] == known.get(name)} == known.keys()
    assert files.keys() == {*NAMES, *known}


def test_files_and_all_folders_up_to_the_checkpoints_are_synced_folders_last(
    run: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    describe(run.path, [folder])
    parents = {".", "model", "model/deep", "model/deep/er", "optimizer"}
    assert {*synced[:4]} == {str(folder / name) for name in NAMES}
    assert {*synced[4:]} == {str(folder / name) for name in parents} | {str(run.checkpoints)}


@pytest.mark.parametrize(
    ("make", "given", "why"),
    [
        (lambda at: (at / "l").symlink_to(at / "meta.json"), "l", r"/l is a link, or is behind one: .* regular files"),
        (lambda at: (at / "l").symlink_to(at / "meta.json"), "", r"/l is a link: a checkpoint has regular files only"),
        (lambda at: (at / "l").symlink_to(at / "model"), "", "/l is a link"),
        (lambda at: (at / "l").symlink_to(at / "model"), "l/a.distcp", r"/l/a\.distcp is a link, or is behind one"),
        (lambda at: (at / "l").symlink_to("nowhere"), "", "/l is a link"),
        (lambda at: os.mkfifo(at / "f"), "f", "/f is not a regular file: a checkpoint has regular files only"),
        (lambda at: os.mkfifo(at / "f"), "", "/f is not a regular file"),
        (lambda at: None, "model/../meta.json", r"meta\.json is not in a folder that me\.checkpoint_dir\(step\)"),
        (lambda at: None, "..", "is not in a folder that me.checkpoint_dir"),
        (lambda at: _write(at.parent / "mine", "a"), "../mine/a", "is not in a folder that me.checkpoint_dir"),
        (lambda at: (at / "empty").mkdir(), "empty", "but 0 files in 1 folders were given"),
        (lambda at: socket.socket(socket.AF_UNIX).bind(str(at / "s")), "", "/s is not a regular file"),
        (lambda at: _write(at, "a\nb"), "", r"step-3.1.0: 'a\\nb' is not a printable name of a file: rename it"),
        (lambda at: _write(at, os.fsdecode(b"\xff")), "", r"step-3.1.0: '\\udcff' is not a printable name"),
    ],
)
def test_what_is_no_regular_file_of_the_folder_is_refused(
    run: RunDir, folder: Path, make: Any, given: str, why: str
) -> None:
    make(folder)
    with pytest.raises(ValueError, match=why) as caught:
        describe(run.path, [folder / given])
    assert "\n" not in str(caught.value)


def test_files_outside_of_a_checkpoint_in_two_or_none_or_twice_are_refused(run: RunDir, folder: Path) -> None:
    other = _write(fresh_folder(run.checkpoints, 3, 1), "b")
    outside = _write(run.path / "mine", "a") / "a"
    for wrong, why in (
        ([outside], r"mine/a is not in a folder that me\.checkpoint_dir\(step\) returned: write it there"),
        ([run.checkpoints], "checkpoints is not in a folder"),
        ([Path("meta.json")], "meta.json is not in a folder"),
        ([], "must be in one folder .* but 0 files in 0 folders were given"),
        ([folder, other / "b"], "must be in one folder .* but 5 files in 2 folders were given"),
        ([folder, folder / "model"], r"model/a\.distcp is given twice: name each file once"),
        ([folder / "meta.json"] * 2, r"meta\.json is given twice"),
    ):
        with pytest.raises(ValueError, match=why):
            describe(run.path, wrong)
    with pytest.raises(FileNotFoundError, match="missing"):
        describe(run.path, [folder / "missing"])


def test_file_that_changes_while_it_is_committed_is_refused(
    run: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(file: Any, algorithm: str) -> Any:
        digest = hash_file(file, algorithm)
        if Path(file.name).name == "meta.json":
            with Path(file.name).open("ab") as writer:
                writer.write(b"late")
        return digest

    hash_file = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", change)
    with pytest.raises(ValueError, match=r"/meta\.json has changed while it was read: commit it after its last write"):
        describe(run.path, [folder])


@pytest.mark.parametrize(
    ("digests", "why"),
    [
        ([{"meta.json": {"sha256": "", "bytes": 1}}], r"digests=\.\.\.\): Expected `object`, got `array`.*one dict"),
        ({"meta.json": 3}, "Expected `object`, got `int`"),
        ({"other": {"sha256": "", "bytes": 1}}, "digests has 'other', which is not among the files of the commit"),
    ],
)
def test_digests_that_are_not_those_of_the_files_are_refused(run: RunDir, folder: Path, digests: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        describe(run.path, [folder], digests)


# ── shares ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("seed", range(5))
def test_each_file_is_in_one_share_and_the_shares_have_about_equally_many_bytes(seed: int) -> None:
    dice = random.Random(seed)
    files: dict[str, Any] = {
        f"f{i}": {"sha256": "", "bytes": dice.choice((0, 5, dice.randint(1, 1000)))} for i in range(200)
    }
    world = dice.randint(1, 9)
    shares = [share_of(files, (rank, world)) for rank in range(world)]
    assert Counter(name for share in shares for name in share) == dict.fromkeys(files, 1)
    loads = [sum(files[name]["bytes"] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(digest["bytes"] for digest in files.values())
    shuffled = dict(dice.sample(sorted(files.items()), len(files)))
    assert shares == [share_of(shuffled, (rank, world)) for rank in range(world)], "ranks disagree about the shares"


@pytest.mark.parametrize("share", [(0, 0), (-1, 2), (2, 2), (3, 2), (0, -1)])
def test_share_that_does_not_exist_is_refused(share: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"^share=\(-?\d, -?\d\): expected \(rank, world\) with 0 <= rank < world"):
        checked_share(share)


def test_each_rank_compares_the_digests_of_its_share_only(run: RunDir, folder: Path) -> None:
    manifest = describe(run.path, [folder])
    damaged = next(iter(share_of(manifest["files"], (1, 2))))
    (folder / damaged).write_bytes(b"other")
    assert verified(run.path, manifest, share_of(manifest["files"], (0, 2))).keys() == {*NAMES}
    with pytest.raises(DamagedCheckpoint, match=f"{damaged} has the digest"):
        verified(run.path, manifest, share_of(manifest["files"], (1, 2)))


# ── a folder with exactly the committed files ──────────────────────────────────────────────────────────────────────
def test_folder_without_other_files_is_used_itself(run: RunDir, folder: Path) -> None:
    (folder / "empty").mkdir()
    assert exact_folder(run.path, describe(run.path, [folder])) == folder


def test_beside_other_files_the_committed_ones_are_linked_once(run: RunDir, folder: Path) -> None:
    manifest = describe(run.path, [folder])
    _write(folder, "scratch", "model/scratch")
    links = exact_folder(run.path, manifest)
    assert links == folder / LINKS
    assert _names(links) == NAMES
    assert all((links / name).samefile(folder / name) for name in NAMES)
    assert exact_folder(run.path, manifest) == links
    _write(links, "changed by a program")
    again = exact_folder(run.path, manifest)
    assert again.parent == folder
    assert _names(again) == NAMES


def test_processes_that_link_at_the_same_time_all_get_a_whole_folder(run: RunDir, folder: Path) -> None:
    manifest = describe(run.path, [folder])
    _write(folder, "scratch")
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: exact_folder(run.path, manifest), range(24))]
    assert {*found} == {folder / LINKS}
    assert _names(folder / LINKS) == NAMES
    assert {path.name for path in folder.iterdir()} == {"meta.json", "model", "optimizer", "scratch", LINKS}


def test_without_hard_links_the_files_are_copied(run: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    manifest = describe(run.path, [folder])
    _write(folder, "scratch")
    monkeypatch.setattr(os, "link", refuse)
    copies = exact_folder(run.path, manifest)
    assert verified(run.path, manifest | {"folder": copies}) == {name: copies / name for name in NAMES}
    assert not (copies / "meta.json").samefile(folder / "meta.json")


def test_checkpoint_that_lacks_a_file_is_damaged(run: RunDir, folder: Path) -> None:
    manifest = describe(run.path, [folder])
    (folder / "model/a.distcp").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"step-3\.1\.0/model/a\.distcp: No such file"):
        exact_folder(run.path, manifest)


KILLED = """
import json, os, sys
from pathlib import Path
from rrl.roles.checkpoints import folders
links, link = [], os.link
def dies(*paths):
    if len(links) == int(sys.argv[3]):
        os.kill(os.getpid(), 9)
    links.append(link(*paths))
os.link = dies
folders.exact_folder(Path(sys.argv[1]), json.loads(sys.argv[2]))
os.kill(os.getpid(), 9)
"""
"""Program that is killed after some links, or before it uses the folder."""


@pytest.mark.parametrize("links", [0, 2, 4])
def test_process_killed_while_it_links_leaves_a_checkpoint_that_its_successor_uses(
    run: RunDir, folder: Path, links: int
) -> None:
    manifest = describe(run.path, [folder])
    _write(folder, "scratch")
    done = subprocess.run([sys.executable, "-P", "-c", KILLED, str(run.path), json.dumps(manifest), str(links)])
    assert done.returncode == -9
    found = exact_folder(run.path, manifest)
    assert _names(found) == NAMES
    assert verified(run.path, manifest).keys() == {*NAMES}
    assert [*run.checkpoints.iterdir()] == [folder], "a leftover would not go with the checkpoint"
