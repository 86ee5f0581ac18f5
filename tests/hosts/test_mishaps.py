"""What happens to a job over several hosts while it trains."""

import contextlib
import re
import shutil
import signal
import subprocess
import time

import jobs
import pytest
import runs

GRACE_S = 25  # of process 0


@pytest.fixture(autouse=True)
def place(network):
    return runs.prepare(network)


@pytest.fixture(scope="module")
def calm(network):
    """The metrics of eight undisturbed steps."""
    runs.prepare(network)
    running = runs.job(network, "ab", runs.sft("calm", 8), "calm")
    assert [process.wait() for process in running] == [0, 0], running[0].said + running[1].said
    network.stop()
    return runs.metrics(network, "calm")


def underway(hosts, out, names="ab", **more):
    """A job of many steps that has made three."""
    running = runs.job(hosts, names, runs.sft(out, 100000, len(names)), out.replace("/", "-"), **more)
    jobs.until(lambda: len(runs.metrics(hosts, out)) >= 3 or any(p.poll() is not None for p in running))
    assert all(process.poll() is None for process in running), [process.said[-2000:] for process in running]
    return running


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_without_power(hosts, calm, victim):
    """No FIN, no RST. The job goes on from its last state, with both hosts, or with one if process 1 was lost."""
    out = f"power-{victim}"
    running = underway(hosts, out)
    running[victim].host.kill()
    began, left = time.monotonic(), running[1 - victim]
    assert left.wait(runs.SILENT_S + GRACE_S + 20) == 3, left.said
    took = time.monotonic() - began
    print(f"{out}: {took:.0f} s")
    line = rf"process {victim} of 2 \(pid \d+ on host-{'ab'[victim]}\) cannot be reached: its host, or the network"
    assert re.search(line, left.said) and "JAX distributed service" not in left.said, left.said
    assert took < runs.SILENT_S + 5 + (GRACE_S if victim else 0)
    hosts.stop()
    for count, names in ((2, "ab"), (1, "d"))[: 1 + victim]:
        again = f"{out}-{count}"
        shutil.copytree(hosts.shared / out, hosts.shared / again)
        saved = max(int(path.name) for path in (hosts.shared / again / "state").iterdir() if path.name.isdigit())
        assert saved + 2 >= runs.metrics(hosts, out)[-1]["step"]
        resumed = runs.job(hosts, names, runs.sft(again, saved + 2, count), again)
        assert [process.wait() for process in resumed] == [0] * count, [process.said[-2000:] for process in resumed]
        known = min(saved + 2, 8)
        runs.equal(runs.metrics(hosts, again)[:known], calm[:known], 0.0 if count == 2 else 1e-5)
        hosts.stop()


def test_a_host_cut_off_for_five_seconds_and_for_a_minute(hosts, calm):
    """With the limits that a job has by default."""
    running = underway(hosts, "cut", silent_s=40)
    hosts["b"].port.cut = True
    time.sleep(5)
    hosts["b"].port.cut = False
    at = len(runs.metrics(hosts, "cut"))
    jobs.until(lambda: len(runs.metrics(hosts, "cut")) >= at + 2, 60)
    runs.equal(runs.metrics(hosts, "cut")[:8], calm[: len(runs.metrics(hosts, "cut")[:8])])
    hosts["b"].port.cut, began = True, time.monotonic()
    assert running[1].wait(60) == 3 and time.monotonic() - began < 50, running[1].said
    time.sleep(max(0, 60 - (time.monotonic() - began)))
    hosts["b"].port.cut = False
    assert running[0].wait(30) == 3, running[0].said
    for process, other in ((running[0], "1 of 2"), (running[1], "0 of 2")):
        assert re.search(rf"process {other} \(pid \d+ on host-\w\) cannot be reached", process.said), process.said
        assert "Traceback" not in process.said and "JAX distributed" not in process.said, process.said


def test_a_host_that_comes_back_without_its_processes(hosts):
    """A half-open connection: the other side believes in it until it sends."""
    running = underway(hosts, "half")
    hosts["b"].kill()
    hosts["b"]  # boots, at the same address
    began = time.monotonic()
    assert running[0].wait(60) == 3, running[0].said
    print(f"half-open: {time.monotonic() - began:.0f} s")
    assert re.search(r"process 1 of 2 \(pid \d+ on host-b\) (ended: it was killed|cannot be reached)", running[0].said)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_stands_still(hosts, victim):
    running = underway(hosts, f"still-{victim}")
    running[victim].signal(signal.SIGSTOP)
    began, left = time.monotonic(), running[1 - victim]
    assert left.wait(runs.SILENT_S + GRACE_S + 20) == 3, left.said
    print(f"still {victim}: {time.monotonic() - began:.0f} s")
    assert re.search(rf"process {victim} of 2 \(pid \d+ on host-\w\) stands still", left.said), left.said
    assert "JAX distributed service" not in left.said


def test_late_and_lost_packets(hosts, calm):
    """200 ms between the hosts, and one packet in twenty lost."""
    for name in "ab":
        hosts[name].port.delay_s, hosts[name].port.loss = 0.1, 0.05
    running = runs.job(hosts, "ab", runs.sft("late", 1), "late", silent_s=40)
    assert [process.wait(300) for process in running] == [0, 0], running[0].said + running[1].said
    runs.equal(runs.metrics(hosts, "late"), calm[:1])


def test_four_hosts_of_which_one_ends(hosts, calm):
    running = underway(hosts, "four", "abde")
    hosts["d"].kill()
    for process in running[:2] + running[3:]:
        assert process.wait(runs.SILENT_S + GRACE_S + 20) == 3, process.said
        assert re.search(r"process 2 of 4 \(pid \d+ on host-d\) cannot be reached", process.said), process.said
    runs.equal(runs.metrics(hosts, "four")[:3], calm[:3], 1e-5)


def test_a_full_disk(hosts, calm):
    """That of the folder which all write to: the last state stays, and with room again the job goes on from there."""
    place = hosts.shared / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", place], check=True)
    try:
        running = underway(hosts, "small/run")
        with contextlib.suppress(OSError), open(place / "other", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        began = time.monotonic()
        codes = [process.wait(120) for process in running]
        print(f"full disk: {time.monotonic() - began:.0f} s, {codes}")
        assert 0 not in codes and "No space left" in running[0].said + running[1].said, running[0].said
        assert "JAX distributed" not in running[0].said + running[1].said
        (place / "other").unlink()
        steps = runs.metrics(hosts, "small/run")[-1]["step"] + 1
        again = runs.job(hosts, "ab", runs.sft("small/run", steps), "small-again")
        assert [process.wait() for process in again] == [0, 0], again[0].said + again[1].said
        runs.equal(runs.metrics(hosts, "small/run")[:8], calm[:steps])
    finally:
        hosts.stop()
        subprocess.run(["umount", place], check=True)
