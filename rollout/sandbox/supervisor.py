"""The supervisor of one sandboxed command: `python -I -S supervisor.py SPEC`, started only by `sandbox`.

It sets up the isolation, starts the command, enforces limits that the kernel does not, and kills all its processes. It
reports as JSON lines on a pipe: {"code", "why"}, {"why"} if it stopped the command, {"error"} if that never ran.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import struct
import sys
import time
from typing import Any

OPEN_FILES = 256
WAITING = 2**18  # bytes that may wait in a socket, which no process maps: Linux' default is 208 KiB
INODES = 4096  # most files and folders in the sandbox's file system
ROOM = 2**20  # bytes reserved there for folders and the program, so that the limit of one file is reached first
HOME = "/tmp/work"
PLACES = "/tmp/places"  # has the folders that links elsewhere lead to
NOBODY = 65534
OWN_USERS = 2**30  # plus the process id: a user id that is not in use
NAMESPACES = ("namespaces", "user namespaces")  # of the four modes; the others are "own user" and "same user"

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store",
    "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# Constants of <sched.h>, <sys/mount.h> and <sys/prctl.h>; Python 3.11 has none of these calls.
NEW_MOUNT, NEW_IPC, NEW_USER, NEW_PID, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, BIND, REC, PRIVATE, DETACH = 2, 4, 4096, 16384, 1 << 18, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # Linux 5.12
READ_ONLY = (ctypes.c_uint64 * 4)(1 | 2 | 4, 0, 0, 0)  # struct mount_attr: set read-only, nosuid, nodev
PARENT_DEATH_SIGNAL, DUMPABLE, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 36, 38
# Of <linux/seccomp.h>, <linux/bpf_common.h> and <linux/audit.h>.
SECCOMP, SECCOMP_FILTER, ALLOW, REFUSE = 22, 2, 0x7FFF0000, 0x00050000 | 1  # EPERM
LOAD, EQUAL, AT_LEAST, RETURN, X32 = 0x20, 0x15, 0x35, 0x06, 0x40000000
# Calls that hold memory which no process maps, so that no limit counts it: memfd_create, memfd_secret, shmget, msgget,
# semget, io_uring_setup. The architecture stands first.
REFUSED = {
    "x86_64": (0xC000003E, 319, 447, 29, 68, 64, 425),
    "aarch64": (0xC00000B7, 279, 447, 194, 186, 190, 425),
}
IGNORED = signal.SIGINT, signal.SIGUSR1  # schedulers send them to all processes of a job

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})  # `watch` waits for them
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    spec = json.loads(sys.argv[1])
    os.set_inheritable(spec["report"], False)
    guarded(supervise, spec)


def guarded(step: Any, spec: dict) -> None:
    """Runs `step` and exits the process; errors are reported."""
    try:
        step(spec)
    except BaseException as error:  # passed to the process that reads the reports
        report(spec, error=f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def report(spec: dict, **outcome: Any) -> None:
    os.write(spec["report"], (json.dumps(outcome) + "\n").encode())


def supervise(spec: dict) -> None:
    closed = spec["mode"] in NAMESPACES
    if spec["mode"] in ("user namespaces", "same user") and outside(os.getuid()) == 0:
        raise PermissionError("the number of root's processes cannot be limited")
    open(f"/proc/self/task/{os.getpid()}/children").close()  # `tree` needs a kernel with this file
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the first to be killed when memory runs out
    if closed:
        user, group = os.getuid(), os.getgid()
        call("unshare", NEW_PID | NEW_NETWORK | NEW_IPC | (NEW_USER if spec["mode"] == "user namespaces" else 0))
        if spec["mode"] == "user namespaces":
            write("/proc/self/setgroups", "deny")
            write("/proc/self/uid_map", f"{NOBODY} {user} 1")
            write("/proc/self/gid_map", f"{NOBODY} {group} 1")
    else:
        call("prctl", SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
    call("prctl", DUMPABLE, 0, 0, 0, 0)  # other processes of this user cannot inspect it
    call("prctl", PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != spec["parent"]:
        return
    spec["uid"] = NOBODY if spec["mode"] == "user namespaces" else OWN_USERS + os.getpid()
    if spec["mode"] == "own user":
        os.chown(spec["folder"], spec["uid"], spec["uid"])
    spec["tasks"] = spec["processes"]  # the kernel's limit for the user, which includes this process and `init`
    if spec["mode"] == "user namespaces":
        spec["tasks"] += 2
    elif spec["mode"] == "same user":
        spec["tasks"] += tasks_of_user()
    child = os.fork()
    if child == 0:
        guarded(init if closed else execute, spec)
    ended = watch(spec, child)
    if not closed:
        end_tree()
    elif not ended:
        os.kill(child, signal.SIGKILL)  # the kernel kills all processes of a namespace with its first one
        os.waitpid(child, 0)


def watch(spec: dict, child: int) -> bool:
    """Waits until the child ends, SIGTERM arrives, or the processes together exceed a limit.

    Returns:
      Whether the child has ended.
    """
    closed = spec["mode"] in NAMESPACES
    while True:
        received = signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, spec["period_s"])
        if received and received.si_signo == signal.SIGTERM:
            return False
        pid = -1
        while pid:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == child:
                if not closed:
                    report(spec, **outcome(spec, status, usage))
                return True
        if why := excess(spec, tree(child) if closed else tree(os.getpid())):
            report(spec, why=why)
            return False


def excess(spec: dict, pids: list[int]) -> str:
    """The limit that the processes together exceed, or ""."""
    tasks, used = 0, 0
    sockets: set[str] = set()
    for pid in pids:
        try:
            tasks += len(os.listdir(f"/proc/{pid}/task"))
            used += resident(pid)
            sockets |= opened(pid)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    if tasks >= spec["processes"]:
        return "processes"
    most = spec["memory_bytes"] - WAITING * len(sockets)
    # This counts shared pages once per process; the proportional share, which is slower to read, decides.
    return "memory" if used > most and sum(map(share, pids)) > most else ""


def resident(pid: int) -> int:
    return int(read(f"/proc/{pid}/statm").split()[1]) * resource.getpagesize()


def opened(pid: int) -> set[str]:
    """Names of the sockets that a process has open; as many as it may have if it does not let itself be looked at."""
    found = set()
    try:
        for file in os.scandir(f"/proc/{pid}/fd"):
            try:
                found.add(os.readlink(file.path))
            except FileNotFoundError:  # it is closed
                continue
    except PermissionError:
        return {f"socket:{pid}.{i}" for i in range(OPEN_FILES)}
    return {name for name in found if name.startswith("socket:")}


def share(pid: int) -> int:
    """Proportional set size of a process in bytes: a page shared by n processes counts 1/n."""
    try:
        lines = read(f"/proc/{pid}/smaps_rollup").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:  # it does not let itself be looked at
        try:
            return resident(pid)
        except (FileNotFoundError, ProcessLookupError):
            return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def tree(root: int) -> list[int]:
    """All descendants of the process `root`."""
    pids = [root]
    for pid in pids:  # grows meanwhile
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, read(f"/proc/{pid}/task/{task}/children").split())
        except (FileNotFoundError, ProcessLookupError):  # it has ended; its children were reparented within the tree
            continue
    return pids[1:]


def end_tree() -> None:
    """Kills all descendants of this process and waits for them."""
    while True:
        stopped: set[int] = set()
        while new := set(tree(os.getpid())) - stopped:
            for pid in new:
                kill(pid, signal.SIGSTOP)  # a stopped process cannot fork
            stopped |= new
        for pid in stopped:
            kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def init(spec: dict) -> None:
    """The first process in the namespaces: sets up the root folder, starts the command and waits for it."""
    call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    make_root(spec)
    child = os.fork()
    if child == 0:
        guarded(execute, spec)
    pid = -1
    while pid != child:  # others are orphans reparented to this process
        pid, status, usage = os.wait4(-1, 0)
    report(spec, **outcome(spec, status, usage))


def make_root(spec: dict) -> None:
    """Sets up a root with the system's folders and Python, read-only, and a small in-memory file system at /tmp."""
    outer, uid = spec["folder"], spec["uid"]
    files = {entry.name: open(entry.path, "rb").read() for entry in os.scandir(outer)}  # noqa: SIM115
    call("unshare", NEW_MOUNT)
    mount("none", "/", flags=REC | PRIVATE)
    mount("tmpfs", outer, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    root = f"{outer}/root"
    os.makedirs(f"{root}/tmp")
    size = f"size={spec['files_bytes'] + ROOM},nr_inodes={INODES}"
    mount("tmpfs", f"{root}/tmp", "tmpfs", NOSUID | NODEV, f"{size},mode=700,uid={uid},gid={uid}")
    for path in (*SYSTEM, *spec["readable"], *DEVICES):
        inside = root + path
        if not os.path.exists(path) or os.path.lexists(inside):
            continue
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path) and path in SYSTEM:
            os.symlink(os.readlink(path), inside)
            continue
        if os.path.isdir(path):
            os.mkdir(inside)
        else:
            open(inside, "x").close()
        mount(path, inside, flags=BIND | REC)
        if path not in DEVICES:
            seal(inside, AT_RECURSIVE)
    os.symlink("/tmp", f"{root}/dev/shm")
    for path in spec["places"]:
        os.makedirs(f"{root}{PLACES}{path}")
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(PLACES + path, root + path)
    for folder, _, _ in os.walk(root + PLACES):
        os.chown(folder, uid, uid)
    os.mkdir(root + HOME, 0o700)
    os.chown(root + HOME, uid, uid)
    for name, content in files.items():
        with open(f"{root}{HOME}/{name}", "xb") as file:
            file.write(content)
    os.chdir(outer)
    call("pivot_root", b".", b".")  # the old root is now stacked on top
    call("umount2", b".", DETACH)
    seal("/", 0)
    os.chroot("/root")  # in a chroot the kernel grants no user namespace, which would give rights over mounts
    os.chdir("/")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    try:
        call("mount", source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, {source} at {target}") from None


def seal(path: str, flags: int) -> None:
    call("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, ctypes.byref(READ_ONLY), ctypes.sizeof(READ_ONLY))


def execute(spec: dict) -> None:
    """Replaces this process with the command, with its limits and as its user."""
    os.setsid()
    if spec["mode"] in ("namespaces", "own user"):
        os.setgroups([])
        os.setresgid(*3 * [spec["uid"]])
        os.setresuid(*3 * [spec["uid"]])
    if spec["mode"] not in NAMESPACES:
        call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    forbid(REFUSED.get(os.uname().machine, ()))
    home = HOME if spec["mode"] in NAMESPACES else spec["folder"]
    os.chdir(home)
    for number in (*IGNORED, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    seconds = math.ceil(spec["cpu_s"])
    limit(resource.RLIMIT_CPU, seconds, seconds + 1)  # SIGXCPU, and a second later SIGKILL
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, spec["files_bytes"])
    limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    limit(resource.RLIMIT_NPROC, spec["tasks"])
    limit(resource.RLIMIT_AS, spec["memory_bytes"])
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
    try:
        os.execvpe(spec["command"][0], spec["command"], environment)
    except OSError as error:
        raise OSError(error.errno, f"cannot run {spec['command'][0]}: {error.strerror}") from None


def forbid(calls: tuple[int, ...]) -> None:
    """Has the kernel refuse system calls from here on, and all of other architectures (seccomp); the first of `calls`
    is this machine's architecture."""
    if not calls:
        return
    architecture, *numbers = calls
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, REFUSE), (LOAD, 0, 0, 0)]
    steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE)]
    for number in numbers:
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    steps.append((RETURN, 0, 0, ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    fields = struct.pack("H6xQ", len(steps), ctypes.addressof(program))  # struct sock_fprog
    call("prctl", SECCOMP, SECCOMP_FILTER, ctypes.create_string_buffer(fields), 0, 0)


def limit(which: int, soft: int, hard: int | None = None) -> None:
    most = resource.getrlimit(which)[1]
    clip = (lambda value: value) if most == resource.RLIM_INFINITY else (lambda value: min(value, most))
    resource.setrlimit(which, (clip(soft), clip(soft if hard is None else hard)))


def outcome(spec: dict, status: int, usage: resource.struct_rusage) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    spent = usage.ru_utime + usage.ru_stime >= spec["cpu_s"]
    if code == -signal.SIGXCPU or code == -signal.SIGKILL and spent:
        return {"code": code, "why": "cpu"}
    return {"code": code, "why": "files" if code == -signal.SIGXFSZ else ""}


def tasks_of_user() -> int:
    """The number of threads of this user on the machine: RLIMIT_NPROC counts them all."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = dict(line.split(":", 1) for line in read(f"/proc/{name}/status").splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue
        count += int(fields["Threads"]) if int(fields["Uid"].split()[0]) == os.getuid() else 0
    return count


def outside(uid: int) -> int:
    """Maps a user id to the one in the parent namespace; -1 if it has none."""
    ranges = [tuple(map(int, line.split())) for line in read("/proc/self/uid_map").splitlines()]
    return next((first + uid - start for start, first, count in ranges if start <= uid < start + count), -1)


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the C library; raises OSError if it fails."""
    longs = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if getattr(libc, name)(*longs) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
