"""Programs that are started end with who started them."""

import subprocess
import sys
from select import select

BUSY = """
import signal, threading
from potluck.flower.deploy.processes import end_with_parent

end_with_parent()
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("busy", flush=True)
threading.Event().wait(60)
"""
STARTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_process_ends_with_its_parent_whatever_it_waits_for():
    with subprocess.Popen([sys.executable, "-c", STARTER, BUSY], stdout=subprocess.PIPE) as starter:
        assert starter.stdout.readline() == b"busy\n"
        assert select([starter.stdout], [], [], 0.5)[0] == []  # both have it open
        starter.kill()
        starter.communicate(timeout=10)  # until nobody has
