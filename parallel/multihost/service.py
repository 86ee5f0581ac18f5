"""JAX's coordination service in a process of its own, which outlives process 0 by some seconds.

When the service's connections close, JAX aborts every process of the job with stacks of C++, often before `liveness`
can say who has ended.
"""

import os
import signal
import subprocess
import sys
import time

LINGER_S = 5.0  # in which the others notice that process 0 has ended
READY = b"ready\n"


def start(address: str, count: int, heartbeat_s: int) -> subprocess.Popen[bytes]:
    """Starts it, in process 0; `stop` ends it.

    Raises RuntimeError if it does not start.
    """
    command = [sys.executable, "-P", __file__, address, str(count), str(heartbeat_s)]
    pipe, session = subprocess.PIPE, True  # of its own, which Ctrl-C does not reach
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=session)
    assert process.stdout
    if process.stdout.readline() != READY:
        raise RuntimeError(f"processes: JAX's coordination service did not start at {address}")
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends it, once no process needs it."""
    process.communicate(b".")


def main(address: str, count: str, heartbeat_s: str) -> None:
    from jax._src.lib import _jax

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # a scheduler sends them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    service = _jax.get_distributed_runtime_service(address, int(count), heartbeat_timeout=int(heartbeat_s))
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    if not sys.stdin.buffer.read(1):  # process 0 has ended otherwise
        time.sleep(LINGER_S)
    service.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
