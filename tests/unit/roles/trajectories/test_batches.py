"""What a trainer reads of a part and of a share of it: trajectories as tuples, or as arrays."""

from __future__ import annotations

from array import array

import msgspec
import numpy
import pytest

from rrl.config.job import validation
from rrl.core.types import Version
from rrl.roles.trajectories.batches import Batch, NotLocal, decode
from rrl.roles.trajectories.durable.records import pack_tokens
from rrl.roles.trajectories.partition import cut, shares_of
from rrl.roles.trajectories.types import Answer, By, PackedPart, PackedTrajectory, PartBound, Share, Trajectory
from rrl.transport.control.sockets import CONTROL_BOUNDS, Codec, encode_frame

_PROMPTS = {3: (2, 3, 4), 7: (5,)}


def _packed(trajectory: int, group: int, tokens: int, runs: tuple[tuple[int, int, int], ...]) -> PackedTrajectory:
    content = array("f", [-0.5 * place for place in range(tokens)]).tobytes()
    words = pack_tokens(tuple(range(tokens)))
    length = len(_PROMPTS.get(group, ()))
    return PackedTrajectory(trajectory, group, words, content, runs, 1.0, trajectory / 2, length)


def _part() -> PackedPart:
    trajectories = (
        _packed(6, 3, 3, ((1, 4, 1), (2, 5, 2))),
        _packed(7, 3, 0, ()),
        _packed(14, 7, 1, ((1, 5, 2),)),
        _packed(15, 7, 2, ((2, 5, 2),)),
        _packed(16, 7, 2, ((2, 4, 1),)),
    )
    prompts = tuple(map(pack_tokens, _PROMPTS.values()))
    return PackedPart(9, (3, 7), "digest", prompts, trajectories, 2, stale=2, max_age=3)


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
    2,
    stale=2,
    max_age=3,
)


def test_part_is_decoded_to_plain_tuples_on_every_path() -> None:
    read = Codec(Answer).decode(encode_frame(1, 2, PartBound(_part())))
    assert read is not None
    assert decode(read[2].part) == WHOLE


@pytest.mark.parametrize("by", ["group", "sequence"])
@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_share_has_own_tokens_and_the_other_values_of_all_trajectories(world: int, by: By) -> None:
    whole = decode(_part()).arrays
    for rank in range(world):
        share = Share(rank, world, by)
        part = decode(cut(_part(), share), share)
        assert msgspec.structs.replace(part, trajectories=()) == msgspec.structs.replace(WHOLE, trajectories=())
        mine = shares_of(_part(), share)[rank]
        for place, (one, of) in enumerate(zip(part.trajectories, WHOLE.trajectories, strict=True)):
            if place in mine:
                assert one == of
                continue
            assert (one.id, one.group, one.training, len(one.prompt)) == (of.id, of.group, of.training, len(of.prompt))
            assert len(one.tokens) == len(one.logprobs) == len(one.versions) == len(of.tokens)
            assert tuple(one.versions) == of.versions
        for name in whole.whole.__struct_fields__:
            assert numpy.array_equal(getattr(part.arrays.whole, name), getattr(whole.whole, name))
            assert numpy.array_equal(getattr(part.arrays, name), getattr(whole.whole, name)[mine])


def test_arrays_are_the_prompt_and_the_answer_of_each_sequence_of_the_share() -> None:
    share = Share(0, 2, "sequence")
    assert shares_of(_part(), share)[0] == [0, 4], "the partition changed, and with it the expected values below"
    got = decode(cut(_part(), share), share).arrays
    assert got.starts.tolist() == [0, 6, 9]
    assert got.tokens.tolist() == [2, 3, 4, 0, 1, 2, 5, 0, 1]
    assert got.logprobs.tolist() == [0, 0, 0, 0, -0.5, -1, 0, 0, -0.5]
    assert got.versions.tolist() == [-1, -1, -1, 4, 5, 5, -1, 4, 4]
    assert got.loss_mask.tolist() == [False, False, False, True, True, True, False, True, True]
    assert (got.ids.tolist(), got.groups.tolist(), got.training.tolist()) == ([6, 16], [3, 7], [3.0, 8.0])
    assert (got.prompt_lengths.tolist(), got.lengths.tolist(), got.trained.tolist()) == ([3, 1], [6, 3], [3, 2])
    assert got.whole.trained.tolist() == [3, 0, 1, 2, 2]
    types = [each.dtype.name for each in (got.starts, got.tokens, got.logprobs, got.versions, got.loss_mask)]
    assert types == ["int64", "int32", "float32", "int32", "bool"]
    got.tokens[0] = 9  # torch.from_numpy warns of arrays that cannot be written


def test_masked_runs_and_own_prompts_of_samples_are_in_the_arrays() -> None:
    runs = (2, 4, 1), (1, -1, 0), (1, 5, 1)
    one = msgspec.structs.replace(_packed(1, 8, 4, runs), prompt=pack_tokens((7, 8)), prompt_length=2, masked=((2, 1),))
    got = decode(PackedPart(1, (8,), "", (b"",), (one,))).arrays
    assert got.tokens.tolist() == [7, 8, 0, 1, 2, 3]
    assert got.versions.tolist() == [-1, -1, 4, 4, -1, 5]
    assert got.loss_mask.tolist() == [False, False, True, True, False, True]
    assert got.trained.tolist() == [3]


def test_extras_of_a_share_are_arrays_with_zeros_for_prompts() -> None:
    first, empty, other, *rest = _part().trajectories
    with_extras = (
        msgspec.structs.replace(first, extras=(("image", 0, b"pixels"), ("routes", 2, bytes(range(1, 7))))),
        msgspec.structs.replace(empty, extras=(("routes", 2, b""),)),
        msgspec.structs.replace(other, extras=(("routes", 2, b"\7\7"),)),
    )
    part = msgspec.structs.replace(_part(), trajectories=(*with_extras, *rest))
    share = Share(0, 2)
    mine = [part.trajectories[index].id for index in shares_of(part, share)[0]]
    got = decode(cut(part, share), share).arrays
    assert mine == [6, 7]
    assert got.extras["routes"].tolist() == [[0, 0]] * 3 + [[1, 2], [3, 4], [5, 6]] + [[0, 0]] * 3
    assert got.sequence_extras == {"image": [b"pixels", b""]}
    assert decode(part).arrays.extras["routes"].shape == (len(decode(part).arrays.tokens), 2)


def test_arrays_are_made_without_decoding_a_trajectory_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.roles.trajectories.batches._decode_trajectory", None)
    part = decode(_part())
    assert part.arrays is part.arrays
    assert len(part.trajectories) == 5
    with pytest.raises(TypeError):
        part.trajectories[0]


def test_share_without_a_trajectory_has_empty_arrays() -> None:
    share = Share(0, 6, "group")
    arrays = decode(cut(_part(), share), share).arrays
    assert (arrays.tokens.tolist(), arrays.starts.tolist(), arrays.ids.tolist()) == ([], [0], [])
    assert [len(each) for each in arrays.micro_batches(6)] == [0, 0]


def test_part_made_by_hand_has_no_arrays() -> None:
    with pytest.raises(ValueError, match="has yielded"):
        _ = WHOLE.arrays


def test_access_to_tokens_of_another_rank_raises() -> None:
    share = Share(0, 2, "group")
    theirs = [one for one in decode(cut(_part(), share)).trajectories if isinstance(one.tokens, NotLocal)]
    assert theirs
    for values in (theirs[0].tokens, theirs[0].logprobs, theirs[0].prompt):
        with pytest.raises(LookupError, match="another rank"):
            list(values)


def test_batch_accepted_by_the_check_of_job_toml_fits_into_a_message() -> None:
    assert CONTROL_BOUNDS.max_frame_bytes == validation.MAX_BATCH_BYTES
    tokens, versions = 1000, 60
    trajectory = _packed(2**40, 2**40, tokens, ((tokens // versions + 2**20, 2**20, 2**20),) * versions)
    data = msgspec.msgpack.encode(trajectory)
    assert len(data) <= validation._TOKEN_BYTES * tokens + validation._TRAJECTORY_BYTES
