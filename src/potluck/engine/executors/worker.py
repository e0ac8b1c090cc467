"""What a worker process does."""

import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler

import torch

from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.executors import Inner
from potluck.engine.executors.channel import Channel
from potluck.engine.numerics.allocator import keep_freed_memory


def work(host: ClientRuntime, inner: Inner, parent: Channel, others: Sequence[Channel] = ()) -> None:
    """Carry out bundles until the parent is gone.

    Args:
        host: the runtime that they are for.
        inner: carries them out.
        parent: where they come from, and outcomes go.
        others: channels that a fork has inherited, and closes.
    """
    for terminal in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C is for the parent
        signal.signal(terminal, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()  # or their channels would stay open after the parent is gone
    torch.set_num_threads(1)
    keep_freed_memory()
    with suppress(EOFError, ConnectionError):
        while True:
            jobs = parent.receive()
            try:
                found = inner.together(host, jobs)
            except Exception as error:
                found = [_sendable(error)]
            parent.send(found)


def _sendable(error: Exception) -> Exception:
    """The error with its traceback as a note; as text if it cannot be pickled."""
    error.add_note(f"In a worker process:\n{traceback.format_exc()}")
    try:
        sent = ForkingPickler.dumps(error)
        ForkingPickler.loads(sent)  # not all can be unpickled # pyright: ignore[reportAttributeAccessIssue]
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
