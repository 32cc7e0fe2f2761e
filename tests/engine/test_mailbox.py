"""The mailbox: messages wait for their turn, and a wait ends with its message, with its sender, or in time."""

import threading

import pytest

from raysim.engine.delivery import Mailbox
from raysim.pipeline.errors import SenderStoppedError, WorkerLostError
from raysim.pipeline.messages import Receive

SOON_S, LATE_S = 0.01, 60.0


@pytest.fixture
def mailbox():
    box = Mailbox()
    box.open("now")
    box.begin(3)
    return box


def test_a_letter_is_taken_once_and_by_its_key(mailbox):
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


def test_what_a_sender_sent_before_it_stopped_still_counts(mailbox):
    mailbox.put("now", 3, 1, ("a",), ("first",))
    mailbox.stop("now", 3, 1)
    assert mailbox.take(Receive(1, ("a",)), SOON_S) == ("first",)
    with pytest.raises(SenderStoppedError, match="no message came from worker 1, which broke off"):
        mailbox.take(Receive(1, ("b",)), LATE_S)


@pytest.mark.parametrize("comes", ["message", "stop"])
def test_a_wait_ends_with_what_comes(mailbox, comes):
    put = {"message": lambda: mailbox.put("now", 3, 1, ("a",), ()), "stop": lambda: mailbox.stop("now", 3, 1)}[comes]
    later = threading.Timer(0.05, put)
    later.start()
    if comes == "message":
        assert mailbox.take(Receive(1, ("a",)), LATE_S) == ()
    else:
        with pytest.raises(SenderStoppedError):
            mailbox.take(Receive(1, ("a",)), LATE_S)
    later.join()
