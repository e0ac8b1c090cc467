"""Frames: what is sent arrives, piece by piece."""

import os
import socket
import struct
import threading

import pytest

from potluck.core.ground.errors import WireError
from potluck.engine.frames import LONGEST, limit, receive, send


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def test_frames_of_any_length_arrive_one_by_one(ends):
    here, there = ends
    frames = [b"", b"word", os.urandom(3_000_000), b"\x00"]
    sender = threading.Thread(target=send, args=(here, *frames))
    sender.start()
    assert [receive(there) for _ in frames] == frames
    sender.join()


@pytest.mark.parametrize("sent", [b"", b"\x10", (100).to_bytes(8, "little") + b"half"])
def test_the_other_side_going_away_is_an_end_of_file(ends, sent):
    here, there = ends
    here.sendall(sent)
    here.close()
    with pytest.raises(EOFError):
        receive(there)


def test_whoever_sends_looks_around_while_nobody_reads(ends):
    here, there = ends
    limit(here, 0.02)
    frame, read, looks = os.urandom(3_000_000), [], []

    def look():
        looks.append(None)
        read.append(there.recv(len(frame)))

    send(here, frame, waiting=look)
    here.close()
    while more := there.recv(len(frame)):
        read.append(more)
    assert b"".join(read) == len(frame).to_bytes(8, "little") + frame
    assert looks


def test_whoever_reads_looks_around_while_nobody_sends(ends):
    here, there = ends
    limit(there, 0.02)
    pieces = [b"layed", b"de", (7).to_bytes(8, "little")]
    assert receive(there, waiting=lambda: here.sendall(pieces.pop())) == b"delayed"
    assert not pieces


@pytest.mark.parametrize(("claimed", "longest"), [(2**64 - 1, LONGEST), (LONGEST + 1, LONGEST), (101, 100)])
def test_a_frame_that_claims_too_much_is_refused_before_memory_is_taken(ends, claimed, longest):
    ends[0].sendall(struct.pack("<Q", claimed) + b"x" * 10)
    with pytest.raises(WireError, match=f"a frame of {claimed} bytes; at most {longest} are read"):
        receive(ends[1], longest=longest)
