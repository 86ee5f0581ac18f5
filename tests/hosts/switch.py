"""A network switch in a thread: frames between the interfaces of hosts, some of them late, lost, or dropped."""

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import threading
import time

TUNSETIFF, TAP, NO_HEADER, NEW_NETWORK = 0x400454CA, 0x0002, 0x1000, 0x40000000
IPV4, TCP = b"\x08\x00", 6
FRAME = 1 << 16


def interface(namespace: str, name: str) -> int:
    """Makes an interface in a network namespace; what is read from the file are the frames that its host sends."""
    made: list[int] = []

    def make():  # in a thread of its own, which moves to the namespace
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{namespace}") as space:
            if libc.setns(space.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_HEADER))
        made.append(tun)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


class Port:
    """The switch's side of a host's interface.

    Attributes:
      cut: nothing passes, and nobody is told.
      closed: TCP ports to which nothing passes: a firewall that drops.
      delay_s, loss: of what the host sends.
    """

    def __init__(self, tap: int):
        self.tap = tap
        self.cut = False
        self.closed: set[int] = set()
        self.delay_s = self.loss = 0.0

    def takes(self, frame: bytes) -> bool:
        to_tcp = frame[12:14] == IPV4 and frame[23] == TCP
        return not self.cut and not (to_tcp and int.from_bytes(frame[36:38], "big") in self.closed)


class Switch:
    def __init__(self) -> None:
        self._ports: dict[int, Port] = {}
        self._at: dict[bytes, Port] = {}  # by address
        self._late: list[tuple[float, int, bytes, Port]] = []
        self._selector = selectors.DefaultSelector()
        self._random, self._count, self._ends = random.Random(0), 0, False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def plug(self, port: Port) -> None:
        with self._lock:
            self._ports[port.tap] = port
            self._selector.register(port.tap, selectors.EVENT_READ)

    def unplug(self, port: Port) -> None:
        with self._lock:
            self._selector.unregister(port.tap)
            del self._ports[port.tap]
            self._late = [entry for entry in self._late if entry[3] is not port]
            heapq.heapify(self._late)
        os.close(port.tap)

    def close(self) -> None:
        self._ends = True
        self._thread.join()

    def _run(self) -> None:
        while not self._ends:
            ready = self._selector.select(0.005 if self._late else 0.05)
            with self._lock:
                for key, _ in ready:
                    if key.fd in self._ports:
                        self._take(self._ports[key.fd])
                while self._late and self._late[0][0] <= time.monotonic():
                    _, _, frame, port = heapq.heappop(self._late)
                    self._give(frame, port)

    def _take(self, port: Port) -> None:
        for _ in range(64):
            try:
                frame = os.read(port.tap, FRAME)
            except (BlockingIOError, OSError):  # none is left, or the interface is down
                return
            self._at[frame[6:12]] = port
            if port.cut or self._random.random() < port.loss:
                continue
            if port.delay_s:
                self._count += 1
                heapq.heappush(self._late, (time.monotonic() + port.delay_s, self._count, frame, port))
            else:
                self._give(frame, port)

    def _give(self, frame: bytes, source: Port) -> None:
        known = self._at.get(frame[:6])
        for port in [known] if known else self._ports.values():
            if port is not source and port.tap in self._ports and port.takes(frame):
                try:
                    os.write(port.tap, frame)
                except OSError:  # its host is down
                    continue
