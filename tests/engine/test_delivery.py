"""Messages on Ray: the same parts come out however they travel, and the cluster's threshold is read."""

import subprocess
import sys
import threading
from unittest.mock import MagicMock

import hypothesis.strategies as st
import numpy as np
import pytest
from engines import start as start_inline
from hypothesis import given

from raysim.config import ConfigError
from raysim.engine.delivery import (
    ARGUMENT_BYTES,
    FAR_BYTES,
    NEAR_BYTES,
    Limits,
    Mailbox,
    find_limits,
    join_pieces,
    pieces,
)
from raysim.engine.ray import RayEngine
from raysim.engine.ray_internals import RAY_SETTING
from raysim.pipeline.errors import SenderStoppedError, WorkerLostError
from raysim.pipeline.messages import Receive
from raysim.pipeline.prepare import prepare

RAYS_OWN = 100 * 1024  # the threshold of a Ray that nobody has changed, as the suite's
LARGE = {"model": {"name": "cnn", "width": 16}, "batch_size": 64, "num_microbatches": 2}

messages = st.none() | st.builds(
    lambda header, sizes: (header, *(np.arange(size, dtype=np.uint8) for size in sizes)),
    st.binary(max_size=20),
    st.lists(st.integers(0, 300), max_size=4),
)


@given(st.lists(messages, min_size=1, max_size=3), st.integers(1, 500))
def test_pieces_join_to_the_parts_they_were_cut_from(parts, size):
    cut = list(pieces(tuple(parts), ARGUMENT_BYTES + size))
    assert all(len(piece) <= size for piece in cut)
    for before, after in zip(parts, join_pieces(cut), strict=True):
        assert (before is None) == (after is None)
        if before is not None:
            assert before[0] == after[0]
            for one, other in zip(before[1:], after[1:], strict=True):
                np.testing.assert_array_equal(one, other)


def test_message_in_pieces_arrives_when_complete():
    box = Mailbox()
    box.open("now")
    box.begin(1)
    parts = ((b"head", np.arange(90, dtype=np.uint8)), None)
    cut = list(pieces(parts, ARGUMENT_BYTES + 40))
    assert len(cut) > 2
    box.put("now", 1, 0, ("b",), ("between",))  # type: ignore[arg-type]
    for left, piece in zip(range(len(cut) - 1, -1, -1), cut, strict=True):
        box.put_piece("before", 1, 0, ("a",), piece, left)  # of an earlier session
        box.put_piece("now", 1, 0, ("a",), piece, left)
        assert ((1, 0, ("a",)) in box._messages) == (left == 0)
    (header, *arrays), nothing = box.take(Receive(0, ("a",)), 1.0)
    assert (header, [array.tolist() for array in arrays], nothing) == (b"head", [list(range(90))], None)
    assert box.take(Receive(0, ("b",)), 1.0) == ("between",)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ([4096, 4096], f"`{RAY_SETTING}` of the cluster must be at least 10,000 bytes, but is 4,096."),
        (
            [102_400, 4_194_304],
            f"`{RAY_SETTING}` must be the same on all nodes of the cluster, but is 102,400 bytes on one",
        ),
    ],
    ids=["small", "different"],
)
def test_unusable_inline_threshold_is_refused(found, sentence):
    with pytest.raises(ConfigError) as caught:
        find_limits([MagicMock()] * len(found), lambda calls: found, near=False)
    assert str(caught.value).startswith(sentence)


AVERAGED = {"num_replicas": 2, "replica_gradient": "ErrorFeedback(TopK(0.5))"}


@pytest.mark.slow
@pytest.mark.parametrize("message", [NEAR_BYTES, 20_000], ids=["pieces", "store"])
@pytest.mark.parametrize("changes", [{}, AVERAGED], ids=["links", "links and replicas"])
def test_every_message_path_matches_inline_engine(ray, small, monkeypatch, changes, message):
    monkeypatch.setattr("raysim.engine.ray.find_limits", lambda *_, **__: Limits(16_384, message))
    config = small(**LARGE, **changes, num_stages=2)
    inline, engine = start_inline(config), RayEngine(prepare(config))
    sizes = []
    try:
        engine.start()
        for near, most in ((True, NEAR_BYTES), (False, FAR_BYTES)):
            assert find_limits(engine._actors, ray.get, near=near) == Limits(RAYS_OWN, most)
        for step in range(2):
            for one, other in zip(inline.step(step), engine.step(step), strict=True):
                assert one.losses == other.losses
                assert [link.wire_bytes for link in one.links] == [link.wire_bytes for link in other.links]
                sizes += [link.wire_bytes / link.packets for link in one.links if link.packets]
        assert 20_000 < max(sizes) < NEAR_BYTES
        for own, theirs in zip(inline.state(), engine.state(), strict=True):
            np.testing.assert_array_equal(own, theirs)
    finally:
        engine.close()


SMALL_CLUSTER = """
import ray
from raysim import train
from raysim.config import ConfigError, read_config

if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False, _system_config={"max_direct_call_object_size": 4000})
    try:
        train(read_config("digits-cnn", ["steps=1"]), engine="ray", out=OUT)
    except ConfigError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_cluster_with_a_small_threshold_is_refused(tmp_path):
    program = SMALL_CLUSTER.replace("OUT", repr(str(tmp_path / "run")))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert f"`{RAY_SETTING}` of the cluster must be at least 10,000 bytes, but is 4,000" in done.stdout, done.stderr


SOON_S, LATE_S = 0.01, 60.0


@pytest.fixture
def mailbox():
    box = Mailbox()
    box.open("now")
    box.begin(3)
    return box


def test_message_is_received_once_by_key(mailbox):
    mailbox.put("now", 3, 1, ("b",), ("second",))
    mailbox.put("now", 3, 1, ("a",), ("first",))
    mailbox.put("now", 3, 2, ("a",), ("another's",))
    assert mailbox.take(Receive(1, ("a",)), SOON_S) == ("first",)
    assert mailbox.take(Receive(2, ("a",)), SOON_S) == ("another's",)
    assert mailbox.take(Receive(1, ("b",)), SOON_S) == ("second",)
    with pytest.raises(WorkerLostError, match=r"no message came from worker 1 within `timeout_s` = 0.01 s"):
        mailbox.take(Receive(1, ("a",)), SOON_S)


def test_messages_of_other_sessions_and_earlier_turns_are_dropped_and_later_ones_wait(mailbox):
    for session, turn in (("before", 3), ("now", 2), ("now", 4)):
        mailbox.put(session, turn, 1, ("a",), (f"{session} {turn}",))
        mailbox.stop(session, turn, 2)
    with pytest.raises(WorkerLostError):
        mailbox.take(Receive(1, ("a",)), SOON_S)
    with pytest.raises(WorkerLostError):
        mailbox.take(Receive(2, ("a",)), SOON_S)
    mailbox.begin(4)
    assert mailbox.take(Receive(1, ("a",)), SOON_S) == ("now 4",)
    with pytest.raises(SenderStoppedError):
        mailbox.take(Receive(2, ("a",)), SOON_S)


def test_messages_before_sender_stop_are_delivered(mailbox):
    mailbox.put("now", 3, 1, ("a",), ("first",))
    mailbox.stop("now", 3, 1)
    assert mailbox.take(Receive(1, ("a",)), SOON_S) == ("first",)
    with pytest.raises(SenderStoppedError, match="worker 1 stopped before it sent a message"):
        mailbox.take(Receive(1, ("b",)), LATE_S)


@pytest.mark.parametrize("comes", ["message", "stop"])
def test_wait_ends_at_first_event(mailbox, comes):
    put = {"message": lambda: mailbox.put("now", 3, 1, ("a",), ()), "stop": lambda: mailbox.stop("now", 3, 1)}[comes]
    later = threading.Timer(0.05, put)
    later.start()
    if comes == "message":
        assert mailbox.take(Receive(1, ("a",)), LATE_S) == ()
    else:
        with pytest.raises(SenderStoppedError):
            mailbox.take(Receive(1, ("a",)), LATE_S)
    later.join()
