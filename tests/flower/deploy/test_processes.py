"""Programs that are started end with who started them."""

import os
import subprocess
import sys
import time
from contextlib import suppress

BUSY = """
import signal, threading
from potluck.flower.deploy.processes import end_with_parent

end_with_parent()
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("busy", flush=True)
threading.Event().wait()
"""
STARTER = """
import subprocess, sys, time

child = subprocess.Popen([sys.executable, "-c", {busy!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def runs(process):
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


def test_a_process_ends_with_its_parent_whatever_it_waits_for():
    words = [sys.executable, "-c", STARTER.format(busy=BUSY)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as starter:
        child = int(starter.stdout.readline())
        time.sleep(0.5)
        assert runs(child)
        starter.kill()
        deadline = time.monotonic() + 10
        while runs(child):
            assert time.monotonic() < deadline
            time.sleep(0.05)
