"""Misbehaving programs: every limit is enforced, no foreign data can be read, and nothing is left behind."""

import asyncio
import dataclasses
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from areax.rollout import sandbox
from areax.rollout.sandbox import Limits, Result, run, run_python, supervisor

if sys.platform != "linux":
    pytest.skip("sandboxes need Linux", allow_module_level=True)

MiB = 2**20
MARK = f"areax-test-{os.getpid()}"
BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
LOOSE_BOMB = BOMB.replace("os.fork()", "os.fork() or os.setsid()")
DAEMON = """
import os, time
if os.fork():
    time.sleep({life})
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
os.setsid()
time.sleep(600)
"""


@pytest.fixture(params=[kind for kind in sandbox.ISOLATIONS if not sandbox._refusal(kind)], ids=lambda kind: kind.mode)
def isolation(request, monkeypatch):
    """Every isolation available on this machine."""
    monkeypatch.setattr(sandbox, "isolation", lambda: request.param)
    return request.param


@pytest.fixture
def nothing_left(monkeypatch):
    """Asserts that no process, descriptor or folder is left behind."""
    asyncio.run(run_python(""))  # the first run opens descriptors that stay open
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)  # other users need access
        monkeypatch.setattr(tempfile, "tempdir", folder)
        descriptors, processes = os.listdir("/proc/self/fd"), supervisor.tree(os.getpid())
        yield
        assert os.listdir("/proc/self/fd") == descriptors
        assert supervisor.tree(os.getpid()) == processes
        assert os.listdir(folder) == []
        assert marked() == []


def marked():
    """Command lines of all running processes that descend from `run_marked`, wherever they are now."""
    return [line for line in map(command_line, filter(str.isdigit, os.listdir("/proc"))) if MARK in line]


async def run_marked(code, **limits):
    return await run([sys.executable, "-I", "main.py", MARK], files={"main.py": code}, **limits)


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def python(code, timeout_s=60.0, **limits):  # longer than a busy machine may stall
    return asyncio.run(run_python(code, timeout_s=timeout_s, **limits))


def test_some_isolation_is_available_here():
    assert sandbox.isolation() in sandbox.ISOLATIONS


@pytest.mark.usefixtures("nothing_left")
def test_a_program_is_run(isolation):
    code = "import sys\nprint(input(), 'é')\nprint('\\xff', file=sys.stderr)\nsys.exit(3)"
    assert python(code, stdin="one\n") == Result("one é\n", "ÿ\n", 3, "")
    assert python("import os; os.kill(os.getpid(), 11)").code == -11
    assert python("raise ValueError('no')").stderr.endswith(
        "main.py\", line 1, in <module>\n    raise ValueError('no')\nValueError: no\n"
    )
    done = asyncio.run(run(["sh", "-c", "cat a && pwd && echo $HOME && env | wc -l"], files={"a": "text\n"}))
    text, folder, home, count = done.stdout.splitlines()
    assert (text, folder, done.code) == ("text", home, 0) and int(count) <= 6  # a shell adds PWD and others


@pytest.mark.sweep
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "why, code, limits",
    [
        ("wall", "import time; time.sleep(60)", {"timeout_s": 0.5}),
        ("cpu", "while True: pass", {"cpu_s": 0.3, "timeout_s": 60}),
        ("cpu", "import signal; signal.signal(24, 1)\nwhile True: pass", {"cpu_s": 1, "timeout_s": 60}),
        ("memory", "x = bytearray(10 * 2**30)", {}),
        ("memory", "import numpy; numpy.ones(2**32)", {}),
        ("output", "while True: print('x' * 1000)", {}),
        ("output", "import sys\nwhile True: sys.stderr.write('x')", {"output_bytes": 1000}),
        ("output", "print('x' * 1001)", {"output_bytes": 1000}),
        ("processes", BOMB, {}),
    ],
)
def test_exceeding_a_limit_ends_the_program(isolation, why, code, limits, caplog):
    caplog.set_level(logging.INFO)
    result = python(code, **limits)
    assert result.why == why
    most = limits.get("output_bytes", Limits.output_bytes)
    assert max(len(result.stdout), len(result.stderr)) <= most
    if why == "output":
        assert most in (len(result.stdout), len(result.stderr))
    assert f"stopped at a limit: {why}" in caplog.text


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "why, code",
    [("", DAEMON.format(life=0.1)), ("wall", DAEMON.format(life=60)), ("processes", BOMB), ("processes", LOOSE_BOMB)],
)
def test_no_process_survives(isolation, why, code):
    assert asyncio.run(run_marked(code, timeout_s=1.5 if why == "wall" else 20)).why == why


@pytest.mark.usefixtures("nothing_left")
def test_memory_is_counted_over_all_processes(isolation):
    each = "import os, time\n[os.fork() for _ in range(2)]\nx = bytearray(100 * 2**20)\ntime.sleep(5)"
    assert python(each, memory_bytes=256 * MiB).why == "memory"
    one = "import os, time\nx = bytearray(100 * 2**20)\n[os.fork() for _ in range(2)]\ntime.sleep(0.3)"
    assert python(one, memory_bytes=256 * MiB) == Result("", "", 0, "")  # four processes share one copy


@pytest.mark.usefixtures("nothing_left")
def test_file_sizes_are_limited(isolation):
    grow = "with open('big', 'wb') as file:\n    while True: file.write(bytes(2**20))"
    assert "File too large" in python(grow, files_bytes=8 * MiB).stderr
    assert asyncio.run(run(["dd", "if=/dev/zero", "of=big", "bs=1M"], files_bytes=8 * MiB)).why == "files"
    if isolation.files:
        many = "for i in range(99):\n    with open(f'/tmp/{i}', 'wb') as file: file.write(bytes(2**20))"
        assert "No space left" in python(many, files_bytes=8 * MiB).stderr
        assert "No space left" in python("for i in range(9999): open(str(i), 'w').close()").stderr


@pytest.mark.usefixtures("nothing_left")
def test_a_folder_with_restricted_permissions_is_removed(isolation):
    code = "import os\nos.makedirs('a/b/c'); os.symlink('/', 'a/root'); os.chmod('a/b', 0); os.chmod('a', 0)"
    assert python(code).code == 0
    assert os.stat("/").st_mode & 0o777 != 0o700


@pytest.mark.usefixtures("nothing_left")
def test_environment_isolation_is_as_declared(isolation, monkeypatch):
    monkeypatch.setenv("AREAX_SECRET", "17")
    assert "SECRET" not in python("import os; print(os.environ)").stdout
    # A process of the same user as the sandbox's parent, with a secret in its environment.
    with subprocess.Popen(["sleep", "600"]) as outside:
        code = (
            "import glob\n"
            "for name in glob.glob('/proc/*/environ'):\n"
            "    try: print(name, open(name).read())\n"
            "    except OSError as error: print(error)\n"
        )
        read = python(code, output_bytes=2**24).stdout
        outside.kill()
    assert ("SECRET" in read) != isolation.environment


@pytest.mark.usefixtures("nothing_left")
def test_file_isolation_is_as_declared(isolation):
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("secret")
        file.flush()
        os.chmod(file.name, 0o644)
        assert ("secret" in python(f"print(open({file.name!r}).read())").stdout) != isolation.files
    # the visible parts of Python and the system are not writable
    code = (
        "import os, sys\nprint([p for p in ('/', '/usr', '/tmp/..', sys.prefix, os.__file__) if os.access(p, os.W_OK)])"
    )
    assert python(code).stdout == "[]\n" or not isolation.files


@pytest.mark.usefixtures("nothing_left")
def test_network_isolation_is_as_declared(isolation):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as hidden:
        hidden.bind("\0areax-test-" + str(os.getpid()))  # an abstract socket, which is in no folder
        hidden.listen()
        for family, address in ((2, server.getsockname()), (1, hidden.getsockname())):
            code = f"import socket\nsocket.socket({family}).connect({address!r})\nprint('connected')"
            assert ("connected" in python(code).stdout) != isolation.network


FILL = """
import os, socket, time
for _ in range(7):
    if not os.fork():
        {first}
        pairs = [socket.socketpair() for _ in range(120)]
        for pair in pairs:
            for one in pair:
                one.setblocking(False)
                try:
                    while True: one.send(bytes(2**16))
                except BlockingIOError: pass
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("first", ["pass", "import ctypes; ctypes.CDLL(None).prctl(4, 0)"])
def test_what_waits_in_sockets_counts_as_memory(isolation, first):
    """1,680 sockets hold up to 350 MB, also of processes that do not let themselves be looked at."""
    assert python(FILL.format(first=first), memory_bytes=300 * MiB, timeout_s=20).why == "memory"
    assert python("import asyncio\nasyncio.run(asyncio.sleep(0.2))").code == 0


@pytest.mark.usefixtures("nothing_left")
def test_no_file_descriptor_is_inherited(isolation):
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        code = "import os\nfor number in range(3, 256):\n    try: print(os.fstat(number))\n    except OSError: pass"
        assert python(code) == Result("", "", 0, "")


@pytest.mark.usefixtures("nothing_left")
def test_a_program_cannot_lift_its_limits(isolation):
    code = (
        "import resource\n"
        "for name in ('AS', 'CPU', 'FSIZE', 'NOFILE', 'NPROC', 'CORE'):\n"
        "    which = getattr(resource, 'RLIMIT_' + name)\n"
        "    try: resource.setrlimit(which, (-1, -1))\n"
        "    except (ValueError, OSError): continue\n"
        "    print(name)\n"
    )
    assert python(code) == Result("", "", 0, "")


@pytest.mark.usefixtures("nothing_left")
def test_a_program_has_no_privileges(isolation):
    for attempt in ("os.setuid(0)", "os.chroot('/tmp')", "os.mknod('x', 0o60600, 0x700)", "os.kill(1, 9) or 1 / 0"):
        assert python(f"import os\n{attempt}").code == 1


@pytest.mark.usefixtures("nothing_left")
def test_a_program_cannot_create_namespaces(isolation):
    code = "import ctypes; print([ctypes.CDLL(None).unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)])"
    assert python(code).stdout == "[-1, -1, -1]\n" or not isolation.files


@pytest.mark.usefixtures("nothing_left")
def test_cancelling_a_run_ends_the_program():
    async def cancel():
        async with asyncio.timeout(0.5):
            await run_marked(DAEMON.format(life=60))

    with pytest.raises(TimeoutError):
        asyncio.run(cancel())


@pytest.mark.usefixtures("nothing_left")
def test_a_program_dies_with_the_parent_of_the_sandbox(isolation):
    program = (
        "import asyncio, sys\nfrom areax.rollout import sandbox\n"
        f"sandbox.isolation = lambda: sandbox.{isolation}\n"
        f"command, files = [sys.executable, '-I', 'main.py', {MARK!r}], {{'main.py': {DAEMON.format(life=60)!r}}}\n"
        "asyncio.run(sandbox.run(command, files=files, timeout_s=60))"
    )
    with tempfile.TemporaryDirectory() as folder:  # its contents are left behind by a killed parent
        os.chmod(folder, 0o711)
        with subprocess.Popen([sys.executable], stdin=subprocess.PIPE, env={**os.environ, "TMPDIR": folder}) as parent:
            parent.stdin.write(program.encode())
            parent.stdin.close()
            until(lambda: len(marked()) >= 3)  # the supervisor, the program and its daemon
            parent.kill()
        until(lambda: not marked())


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("nothing_left")
def test_a_fork_bomb_does_not_block_the_event_loop():
    async def beside():
        bomb = asyncio.create_task(run_python(BOMB))
        longest, last = 0.0, time.monotonic()
        while not bomb.done():
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return (await bomb).why, longest

    why, longest = asyncio.run(beside())
    assert why == "processes" and longest < 2


@pytest.mark.usefixtures("nothing_left")
def test_many_runs():
    async def many():
        for i in range(0, 24, 4):
            done = await asyncio.gather(*(run_python(f"print({i + k})") for k in range(4)))
            assert [one.stdout for one in done] == [f"{i + k}\n" for k in range(4)]

    asyncio.run(many())


@pytest.mark.usefixtures("nothing_left")
def test_large_inputs_and_outputs(isolation):
    text = "é\n" * 200_000
    assert python("import sys; sys.stdout.write(sys.stdin.read())", stdin=text, output_bytes=2**21).stdout == text
    assert python("#" * 2**20 + "\nprint(1)").stdout == "1\n"
    assert "SyntaxError" in python("print('\ud800')").stderr  # not UTF-8


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, "1", float("nan"), float("inf")])
def test_a_bad_limit_is_refused(name, value):
    with pytest.raises(ValueError, match=f"sandbox: {name} must be"):
        python("", **{name: value})


def test_programs_that_cannot_run_are_errors():
    for name in ("", ".", "..", "a/b", "/etc/passwd"):
        with pytest.raises(ValueError, match="name without slashes"):
            asyncio.run(run(["true"], files={name: ""}))
    with pytest.raises(RuntimeError, match="cannot run no-such-program: No such file"):
        asyncio.run(run(["no-such-program"]))


MEMFD = """
import ctypes, os
try:
    number = os.memfd_create("hidden")
    os.ftruncate(number, 2**30)
    print("has it")
except OSError as error:
    print(type(error).__name__, error.errno)
print(ctypes.CDLL(None, use_errno=True).shmget(0, 2**20, 0o1600))
"""


def test_memory_that_no_limit_counts_is_refused():
    result = asyncio.run(run_python(MEMFD))
    assert (result.stdout, result.code) == ("PermissionError 1\n-1\n", 0), result
