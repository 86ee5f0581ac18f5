"""A real Slurm on this machine, for tests: a controller and three nodes, on a network that nothing else can reach.

Each of the four is a set of namespaces: processes, a network, a hostname, mounts and /dev/shm of its own. All of them
end with the process that started them, however it ends, since their standard inputs are pipes that it holds.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = {
    "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge", "ip": "iproute2",
    "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux",
}  # fmt: skip
CONTROLLER, BRIDGE = "ctl", "10.77.0.254"
NODES = {"n1": "10.77.0.1", "n2": "10.77.0.2", "n3": "10.77.0.3"}
USER = 4242  # who submits the jobs
LOST_S = 10  # a node that is silent for so long is lost

CONFIG = """\
ClusterName=test
SlurmctldHost={controller}({bridge})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout={lost_s}
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=1:00:00 DefaultTime=0:30:00 State=UP
"""


def missing():
    """Lines that say what this machine lacks."""
    lines = [] if os.geteuid() == 0 else ["root: it makes namespaces with networks of their own"]
    where = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [program for program in PACKAGES if not shutil.which(program, path=where)]
    if absent:
        packages = " ".join(sorted({PACKAGES[program] for program in absent}))
        lines.append(f"{', '.join(absent)}: apt-get install --no-install-recommends {packages}")
    return lines


@contextlib.contextmanager
def running():
    """Yields a cluster; ends it, and removes its folder."""
    folder = Path(tempfile.mkdtemp(prefix="areax-slurm-", dir="/tmp"))  # a socket's path must be short
    try:
        cluster = Cluster(folder)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder)


class Cluster:
    """The cluster, made by `running`. `home` is a folder that the user owns and all nodes see."""

    def __init__(self, folder):
        self.folder, self.home = folder, folder / "home"
        self._machines = {}

    def start(self):
        self.folder.chmod(0o755)
        for name in ("aside", "controller", "munge", "home"):
            (self.folder / name).mkdir()
        os.chown(self.home, USER, USER)
        lines = (f"NodeName={name} NodeAddr={address} CPUs=4 RealMemory=4000" for name, address in NODES.items())
        facts = {"folder": self.folder, "controller": CONTROLLER, "bridge": BRIDGE, "lost_s": LOST_S}
        (self.folder / "slurm.conf").write_text(CONFIG.format(**facts, nodes="\n".join(lines)))
        # slurmd loads a plugin of cgroups, which are not there; since 23.11 it can do without.
        plugin = "disabled" if version() >= (23, 11) else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        (self.folder / "closed").write_text("".join(f"{at} {' '.join(parts)}\n" for at, parts in closed().items()))
        key = self.folder / "munge/key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = " ".join(f"--{one}-file={self.folder}/munge/{one}" for one in ("key", "pid", "log", "seed"))
        munged = f"munged --force --socket={self.folder}/munge/socket {files}"
        self._boot(CONTROLLER, BRIDGE, f"{munged}; slurmctld -f {self.folder}/slurm.conf")
        for name in NODES:
            self.boot(name)
        self.until(lambda: all(map(self.idle, NODES)), "all nodes are idle", 60)

    def boot(self, name):
        """Starts a node that is not there, with nothing of the one that was."""
        self._boot(name, NODES[name], f"slurmd -f {self.folder}/slurm.conf")

    def _boot(self, name, address, command):
        own = self.folder / name
        own.mkdir(exist_ok=True)
        self.name(name, address)
        (own / "group").write_text(Path("/etc/group").read_text() + f"trainee:x:{USER}:\n")
        (own / "passwd").write_text(
            Path("/etc/passwd").read_text() + f"trainee:x:{USER}:{USER}::{self.home}:/bin/bash\n"
        )
        (own / "resolv.conf").write_text("")
        words = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words += ["bash", str(HERE / "machine.sh"), str(self.folder), name, command]
        with open(self.folder / f"{name}.boot.log", "w") as log:
            machine = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment(), start_new_session=True
            )
        self._machines[name] = machine
        self.until(lambda: self.init(name), f"{name} has a process", 10)
        device = "br0" if name == CONTROLLER else "eth0"
        if name == CONTROLLER:
            self._ip(CONTROLLER, "link add br0 type bridge")
        else:
            self._ip(CONTROLLER, f"link add to-{name} type veth peer name eth0 netns {self.init(name)}")
            self._ip(CONTROLLER, f"link set to-{name} master br0 up")
        for line in ("link set lo up", f"addr add {address}/24 dev {device}", f"link set {device} up"):
            self._ip(name, line)
        machine.stdin.write(b"\n")
        machine.stdin.flush()

    def name(self, name, address):
        """Has a machine's hosts file give its own name this address."""
        known = {"localhost": "127.0.0.1", CONTROLLER: BRIDGE, **NODES, name: address}
        (self.folder / name / "hosts").write_text("".join(f"{at} {other}\n" for other, at in known.items()))

    def lose(self, name):
        """Ends a node at once: its processes, its network and its memory are gone."""
        machine = self._machines.pop(name)
        machine.kill()
        machine.wait()
        machine.stdin.close()

    def stop(self):
        for name in [*self._machines]:
            self.lose(name)

    def init(self, name):
        """The first process of a machine; "" if it has none yet."""
        machine = self._machines[name]
        assert machine.poll() is None, (self.folder / f"{name}.boot.log").read_text()
        return Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().strip()

    def _ip(self, name, line):
        subprocess.run(["nsenter", "--target", self.init(name), "--net", "ip", *line.split()], check=True)

    def run(self, name, *words, user=0, codes=(0,)):
        """The output of a program that runs on a machine, in the user's folder; it must end with one of these codes."""
        who = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        enter = ["nsenter", "--target", self.init(name), "--net", "--uts", "--mount", "--pid", "env", "-C", self.home]
        given = environment() | {"SLURM_CONF": f"{self.folder}/slurm.conf", "HOME": str(self.home)}
        done = subprocess.run(
            [*enter, *who, *words], env=given, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
        assert done.returncode in codes, f"{words} on {name}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def sbatch(self, script, *options):
        """Submits a script as the user; returns the job's id."""
        return self.run(CONTROLLER, "sbatch", "--parsable", *options, script, user=USER)

    def ask(self, *words):
        """The answer of a program of Slurm."""
        return self.run(CONTROLLER, *words)

    def job(self, number):
        """What `scontrol show job` says: {field: value}."""
        shown = self.ask("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def idle(self, name):
        return self.ask("sinfo", "--noheader", "--nodes", name, "--format", "%T") == "idle"

    def ended(self, number, timeout_s=240):
        """Waits for a job's end; returns its state and exit code."""
        going = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "STOPPED", "SUSPENDED")
        self.until(lambda: self.job(number)["JobState"] not in going, f"job {number} has ended", timeout_s)
        found = self.job(number)
        return found["JobState"], found["ExitCode"]

    def until(self, condition, what, timeout_s=120):
        """Waits until `condition()` is true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
            time.sleep(0.2)


def environment():
    """Variables for Slurm's programs: those of this process, and the folders of daemons."""
    return os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}


def version():
    """Of Slurm, as (22, 5)."""
    said = subprocess.run(["slurmctld", "-V"], env=environment(), capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", said)[:2])


def closed():
    """Folders that only their owner may enter, on the way to this checkout and its Python: {folder: parts needed}."""
    found = {}
    python = Path(sys.executable)
    for path in (ROOT, python, python.resolve(), Path(sys.base_prefix).resolve()):
        for part in [path, *path.parents][-2::-1]:
            if not part.parent.stat().st_mode & 0o001:
                found.setdefault(str(part.parent), set()).add(part.name)
    return found
