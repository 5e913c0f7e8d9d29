"""The transfer of a batch to the trainer, and the share of the batch that each member of a gang gets."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from rrl.config.job import validation
from rrl.core.types import Version
from rrl.roles.trajectories.batches import NotLocal, decode, shard_for
from rrl.roles.trajectories.durable.records import pack_tokens
from rrl.roles.trajectories.types import Answer, Batch, PackedPart, PackedTrajectory, Part, PartBound, Trajectory
from rrl.transport.control.sockets import CONTROL_BOUNDS, Codec, encode_frame

_PROMPTS = {3: (2, 3, 4), 7: (5,)}


def _packed(trajectory: int, group: int, tokens: int, runs: tuple[tuple[int, int, int], ...]) -> PackedTrajectory:
    content = array("f", [-0.5 * place for place in range(tokens)]).tobytes()
    return PackedTrajectory(trajectory, group, pack_tokens(tuple(range(tokens))), content, runs, 1.0, trajectory / 2)


def _batch() -> PackedPart:
    trajectories = (
        _packed(6, 3, 3, ((1, 4, 1), (2, 5, 2))),
        _packed(7, 3, 0, ()),
        _packed(14, 7, 1, ((1, 5, 2),)),
        _packed(15, 7, 2, ((2, 5, 2),)),
        _packed(16, 7, 2, ((2, 4, 1),)),
    )
    return PackedPart(9, (3, 7), "digest", tuple(map(pack_tokens, _PROMPTS.values())), trajectories, stale=2)


def _whole(trajectory: int, group: int, tokens: int, *versions: Version) -> Trajectory:
    logprobs = tuple(-0.5 * place for place in range(tokens))
    return Trajectory(trajectory, group, _PROMPTS[group], tuple(range(tokens)), logprobs, versions, 1.0, trajectory / 2)


OLD, NEW = Version(4, 1), Version(5, 2)
WHOLE = Batch(
    9,
    (3, 7),
    "digest",
    (
        _whole(6, 3, 3, OLD, NEW, NEW),
        _whole(7, 3, 0),
        _whole(14, 7, 1, NEW),
        _whole(15, 7, 2, NEW, NEW),
        _whole(16, 7, 2, OLD, OLD),
    ),
    stale=2,
)


def test_batch_is_decoded_to_plain_tuples_on_every_path() -> None:
    read = Codec(Answer).decode(encode_frame(1, 2, PartBound(_batch())))
    assert read is not None
    assert decode(read[2].part) == WHOLE


@pytest.mark.parametrize("world", [2, 3, 6])
def test_shard_has_own_tokens_and_the_metadata_of_all_trajectories(world: int) -> None:
    for rank in range(world):
        mine = decode(shard_for(_batch(), rank, world))
        assert mine.trajectories[rank::world] == WHOLE.trajectories[rank::world]
        assert mine.trajectories[0] == WHOLE.trajectories[0]
        for one, of in zip(mine.trajectories, WHOLE.trajectories, strict=True):
            assert (one.id, one.group, one.prompt, one.training) == (of.id, of.group, of.prompt, of.training)
            assert len(one.tokens) == len(one.logprobs) == len(one.versions) == len(of.tokens)
            assert tuple(one.versions) == of.versions
        assert (mine.number, mine.groups, mine.digest, mine.stale) == (9, (3, 7), "digest", 2)


def _part() -> PackedPart:
    batch = _batch()
    return PackedPart(9, batch.groups, "digest", batch.prompts, batch.trajectories, 2, stale=2, max_age=3)


def test_part_is_decoded_and_sharded_like_a_batch() -> None:
    read = Codec(Answer).decode(encode_frame(1, 2, PartBound(_part())))
    assert read is not None
    assert decode(read[2].part) == Part(9, (3, 7), "digest", WHOLE.trajectories, 2, True, 2, 3)
    for rank in range(3):
        mine = shard_for(_part(), rank, 3)
        assert mine.trajectories == shard_for(_batch(), rank, 3).trajectories
        assert msgspec.structs.replace(mine, trajectories=_part().trajectories) == _part()


def test_access_to_tokens_of_another_member_raises() -> None:
    theirs = decode(shard_for(_batch(), 0, 2)).trajectories[3]
    assert isinstance(theirs.tokens, NotLocal)
    with pytest.raises(LookupError, match="another member"):
        list(theirs.tokens)


def test_batch_accepted_by_the_check_of_job_toml_fits_into_a_message() -> None:
    assert CONTROL_BOUNDS.max_frame_bytes == validation.MAX_BATCH_BYTES
    tokens, versions = 1000, 60
    trajectory = _packed(2**40, 2**40, tokens, ((tokens // versions + 2**20, 2**20, 2**20),) * versions)
    data = msgspec.msgpack.encode(trajectory)
    assert len(data) <= validation._TOKEN_BYTES * tokens + validation._TRAJECTORY_BYTES
