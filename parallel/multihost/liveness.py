"""Failure detection: each process holds a TCP connection to process 0, which the OS closes however the process ends.

Over it both sides send a line every few seconds. A process that sends none stands still, or its host is gone. JAX's
coordination service would notice that, too, and abort the others, with the stacks of C++; collectives over TCP fail
early, without naming the culprit, or hang like those on GPUs.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

from ...core import origin
from . import meeting
from .meeting import Link

LOST = 3  # exit code of a process that ends because another process failed
GRACE_S = 25.0  # for process 0 to clean up: servers, folders
LATE_S = 2  # a collective may fail this long before its peer's failure is detected
BEAT_S = 5.0
BEAT, BYE = ".", "bye"
KILLED = "it was killed, or its host"

lost = threading.Event()  # a process of this job has ended: collectives are no longer possible


class FailedElsewhere(ValueError):
    """Another process failed, and says why when it leaves: this one must not be the first to be reported."""


class Watch:
    """This process's connections: those of process 0 to all others, or one to process 0.

    Over each, both sides send a line every BEAT_S seconds: a process that stands still sends none.
    """

    def __init__(self, met: meeting.Meeting, links: list[Link]):
        self.index, self.name = met.me.index, str(met.me)
        self._meeting, self._links = met, links
        self._leaving = False  # set by `goodbye`
        self._left = [threading.Event() for _ in links]
        self._once = threading.Lock()
        if self.index == 0:
            threading.Thread(target=met.refuse_late, daemon=True).start()
        for link, left in zip(links, self._left, strict=True):
            threading.Thread(target=self._read, args=(link, left), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def leave(self, error: BaseException) -> NoReturn:
        """Reports an error and exits; exits with LOST, silently, if the error is due to another process's end."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # must not interrupt this function
        sys.stdout.flush()
        if not isinstance(error, SystemExit):
            lost.wait(GRACE_S if isinstance(error, FailedElsewhere) else LATE_S)
        if not self._once.acquire(blocking=False):  # another process failed first
            lost.wait()
            os._exit(LOST)
        words = origin.words(error)
        if isinstance(error, KeyboardInterrupt):
            code = 130
        elif isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
            if isinstance(error.code, str):
                print(words, file=sys.stderr)
        elif isinstance(error, ValueError | OSError):
            code = 2
            print(words, file=sys.stderr)
        elif isinstance(error, RuntimeError) and origin.raised_here(error):
            code = 1
            print(words, file=sys.stderr)
        else:
            code = 1
            traceback.print_exception(error)
        self._broadcast(f"{type(error).__name__}: {words}")
        sys.stderr.flush()
        os._exit(code)

    def goodbye(self) -> None:
        """Announces that this process is done. Process 0 may still be writing files: the others wait for it, and it for
        them."""
        self._leaving = True
        self._broadcast(BYE)
        for left in self._left:
            left.wait()
        self._meeting.close()
        for link in self._links:
            with contextlib.suppress(OSError):  # closed by the other side
                link.socket.shutdown(socket.SHUT_RDWR)

    def _broadcast(self, line: str) -> None:
        for link in self._links:
            link.send(line)

    def _beat(self) -> None:
        while not all(left.is_set() for left in self._left):
            self._broadcast(BEAT)
            time.sleep(BEAT_S)

    def _read(self, link: Link, left: threading.Event) -> None:
        silent = ""
        try:
            while (line := link.lines.readline().strip()) in (BEAT, BYE):
                if line == BYE:
                    left.set()
        except TimeoutError:
            line, silent = "", _silence(link.socket)
        except OSError:  # connection reset: also ended
            line = ""
        if self._leaving and left.is_set():
            link.close()
            return
        if silent:
            line = f"{link.member} {silent}"
        self._end(line if line.startswith("process ") else f"{link.member} ended: {line or KILLED}")

    def _end(self, line: str) -> None:
        if not self._once.acquire(blocking=False):
            return
        sys.stderr.write(f"{line}; ending {self.name}\n")  # in one piece: what JAX logs meanwhile is on other lines
        sys.stderr.flush()
        lost.set()
        self._meeting.close()
        if self.index:
            os._exit(LOST)
        self._broadcast(line)
        # The main thread cleans up and exits. A signal to the process may go to another thread, and not wake it.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(GRACE_S)
        os._exit(LOST)


def _silence(connection: socket.socket) -> str:
    """What a process that sends nothing does: Linux knows whether its host acknowledges what it is sent."""
    if sys.platform == "linux" and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[2]:  # retransmissions
        return f"cannot be reached: its host, or the network to it, has been silent for {meeting.SILENT_S} s"
    return f"stands still: stopped, or frozen with its host, it has been silent for {meeting.SILENT_S} s"
