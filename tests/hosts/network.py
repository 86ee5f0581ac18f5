"""Hosts on one machine: namespaces with an address, a name, processes, and memory and temporary files of their own.

They share nothing but a network (`switch.py`) and, where asked, a folder, as hosts with a network file system do; and
the tests' compiled programs, of which JAX writes only those of process 0. All that a host runs ends with it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
from switch import Port, Switch, interface

ROOT = Path(__file__).resolve().parents[2]
SHARED, OWN = "/mnt", "/srv"  # in a host: folders that exist on any Linux
# The first process of a host; bash reaps those that lose their parent.
BOOT = """
set -e
mount --make-rprivate /
hostname "$NAME"
[ -z "$SHARED_FROM" ] && mount -t tmpfs tmpfs /mnt || mount --rbind "$SHARED_FROM" /mnt
mount --bind "$OWN_FROM" /srv
mount --bind "$OWN_FROM/hosts" /etc/hosts
mount --bind "$COMPILED_FROM" /srv/jax
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
echo up
while :; do sleep 1000 & wait $!; done
"""


class Process:
    """A process of a host."""

    def __init__(self, host, words, log, environ):
        self.host, self.log = host, Path(log)
        enter = ["nsenter", "-t", str(host.init), "-m", "-u", "-n", "-p", "--", "sh", "-c", 'cd /srv; exec "$@"', "sh"]
        with open(log, "ab") as out:
            self._entered = subprocess.Popen([*enter, *words], env=environ, stdout=out, stderr=out)

    @property
    def said(self):
        return self.log.read_text(errors="replace")

    def poll(self):
        return self._entered.poll()

    def wait(self, timeout_s=240):
        """Its exit code; what it said meanwhile is in the error if it does not end."""
        try:
            return self._entered.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host.name} still runs after {timeout_s} s:\n{self.said[-3000:]}") from None

    def until(self, words, timeout_s=240):
        """Waits until it has said something; it must not end before."""
        deadline = time.monotonic() + timeout_s
        while words not in self.said:
            assert self.poll() is None, f"{self.host.name} ended:\n{self.said[-3000:]}"
            assert time.monotonic() < deadline, f"{self.host.name} did not say {words!r}:\n{self.said[-3000:]}"
            time.sleep(0.05)

    def signal(self, number):
        child = Path(f"/proc/{self._entered.pid}/task/{self._entered.pid}/children").read_text().split()
        os.kill(int(child[0]), number)

    def go_on(self):
        """Continues the command that entered the host, which stops with what it runs."""
        if self.poll() is None:
            self._entered.send_signal(signal.SIGCONT)


class Host:
    """One host; `boot` starts it.

    Attributes:
      up: its network is 10.78.0.N.
    """

    def __init__(self, network, number, name):
        self._network, self.number, self.name = network, number, name
        self.address = f"10.78.0.{number}"
        self.space = f"areax-hosts-{os.getpid()}-{name}"
        self.own = network.folder / name
        (self.own / "jax").mkdir(parents=True)
        self.init, self._booted, self.port = 0, None, None
        self._processes = []

    def boot(self, shared=True):
        """Starts the host. By its own hosts file its name is 127.0.1.1, as on Debian; it has a second address, which
        no other host reaches."""
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {self.name}"]
        lines += [f"{host.address} {host.name}" for host in self._network.hosts.values() if host is not self]
        (self.own / "hosts").write_text("\n".join(lines) + "\n")
        ip("netns", "add", self.space)
        self.port = Port(interface(self.space, "eth0"))
        self._network.switch.plug(self.port)
        for words in (
            "link set lo up", f"addr add 10.78.{100 + self.number}.1/24 dev lo", "link set eth0 mtu 9000",
            f"addr add {self.address}/24 dev eth0", "link set eth0 up",
        ):  # fmt: skip
            ip("-n", self.space, *words.split())
        folder, compiled = (str(self._network.shared) if shared else ""), str(self._network.compiled)
        own = {"NAME": self.name, "OWN_FROM": str(self.own), "SHARED_FROM": folder, "COMPILED_FROM": compiled}
        command = ["ip", "netns", "exec", self.space, "unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
        self._booted = subprocess.Popen(
            [*command, "--kill-child", "bash", "-c", BOOT],
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._booted.stdout.readline() == b"up\n", f"{self.name} does not boot"
        [child] = Path(f"/proc/{self._booted.pid}/task/{self._booted.pid}/children").read_text().split()
        self.init = int(child)
        return self

    def start(self, words, log, **environ):
        """Runs a command in /srv; its output is added to a file."""
        own = {"JAX_COMPILATION_CACHE_DIR": f"{OWN}/jax", "JAX_PLATFORMS": "cpu", **jobs.settings(1), **environ}
        inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        self._processes.append(process := Process(self, [str(word) for word in words], log, {**inherited, **own}))
        return process

    def python(self, *words, log, **environ):
        return self.start([sys.executable, *words], log, **environ)

    def shell(self, line):
        done = self.start(["sh", "-c", line], self._network.folder / "shell.log")
        assert done.wait(60) == 0, done.said[-1000:]

    def kill(self):
        """Ends it as a loss of power does: its processes at once, and nothing is sent any more."""
        if self.port:
            self.port.cut = True
        if self.init:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init, signal.SIGKILL)  # the kernel ends all that it runs
            for process in self._processes:
                process.go_on()
            self._booted.wait()
            self._booted.stdout.close()
            self.init = 0
            while self._processes:
                self._processes.pop().wait(20)
        if self.port:
            self._network.switch.unplug(self.port)
            self.port = None
            ip("netns", "del", self.space)


class Network:
    """Hosts a to e, host c without the shared folder."""

    def __init__(self, folder):
        self.folder, self.shared, self.compiled = folder, folder / "shared", folder / "compiled"
        self.shared.mkdir()
        self.compiled.mkdir()
        self.switch = Switch()
        self.hosts: dict[str, Host] = {}
        for number, name in enumerate("abcde", 1):
            self.hosts[name] = Host(self, number, f"host-{name}")

    def __getitem__(self, name):
        """A host that runs."""
        host = self.hosts[name]
        return host if host.init else host.boot(shared=name != "c")

    def stop(self):
        for host in self.hosts.values():
            host.kill()

    def close(self):
        self.stop()
        self.switch.close()


def ip(*words):
    subprocess.run(["ip", *words], check=True)
