import signal
import socket
import subprocess

import pytest

from areax.parallel.multihost import service


@pytest.mark.slow
def test_signals_of_a_scheduler_leave_the_service():
    """`scancel --signal` sends them to every process of a step, to have the stacks of the trainers printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running = service.start(address, 1, 10)
    try:
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            running.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.5)
        service.stop(running)
        assert running.returncode == 0
    finally:
        running.kill()
