"""Reinforcement learning: a trainer over two hosts, its server and a stager on a third, which shares no folder."""

import re
import time

import jobs
import pytest
import runs


@pytest.fixture(autouse=True)
def place(network):
    return runs.prepare(network)


@pytest.fixture(scope="module")
def calm(network):
    """The metrics of four undisturbed steps."""
    runs.prepare(network)
    with runs.serving(network) as (server, _):
        running = runs.job(network, "ab", runs.grpo("rl-calm", 4), "rl-calm")
        assert [process.wait() for process in running] == [0, 0], running[0].said + running[1].said + server.said
    network.stop()
    return runs.metrics(network, "rl-calm")


def test_late_and_lost_packets(hosts, calm):
    """200 ms from and to the server, one packet in twenty lost, and clocks that are hours apart."""
    with runs.serving(hosts):
        hosts["c"].port.delay_s, hosts["c"].port.loss = 0.2, 0.1  # of one direction, which is as good as of both
        wrong = {"a": {"WRONG_BY_S": "18000"}, "b": {"WRONG_BY_S": "-10800"}}
        running = runs.job(hosts, "ab", runs.grpo("rl-late", 2), "rl-late", silent_s=40, environ=wrong)
        assert [process.wait(400) for process in running] == [0, 0], running[0].said + running[1].said
    runs.equal(runs.metrics(hosts, "rl-late"), calm[:2])


def test_a_firewall_that_drops_what_goes_to_a_server(hosts, calm):
    """For a while: the run waits. For good: it ends, names the server, and goes on from its state."""
    with runs.serving(hosts):
        words = runs.grpo("rl-closed", 100000)
        running = runs.job(hosts, "ab", words, "rl-closed")
        seen = lambda: len(runs.metrics(hosts, "rl-closed"))
        jobs.until(lambda: seen() >= 1 or running[0].poll() is not None)
        hosts["c"].port.closed = {runs.SERVER}
        time.sleep(8)
        hosts["c"].port.closed, at = set(), seen()
        jobs.until(lambda: seen() >= at + 2 or running[0].poll() is not None, 120)
        hosts["c"].port.closed, began = {runs.SERVER}, time.monotonic()
        assert running[0].wait(240) not in (0, None) and running[1].wait(60) not in (0, None), running[0].said
        print(f"server behind a firewall: {time.monotonic() - began:.0f} s")
        assert "http://host-c:30000" in running[0].said.splitlines()[-1], running[0].said
        assert "Traceback" not in running[0].said + running[1].said
        hosts["c"].port.closed = set()
        steps = max(4, seen() + 1)
        again = runs.job(hosts, "ab", runs.grpo("rl-closed", steps), "rl-closed-again")
        assert [process.wait() for process in again] == [0, 0], again[0].said + again[1].said
    runs.equal(runs.metrics(hosts, "rl-closed")[:4], calm)


def test_a_host_of_the_trainer_and_that_of_the_server_without_power(hosts, calm):
    """First the server's host, which comes back; then the trainer's second one: the job goes on from its last state."""
    out = "rl-power"
    with runs.serving(hosts):
        running = runs.job(hosts, "ab", runs.grpo(out, 100000, **{"server-timeout-s": 120}), out)
        jobs.until(lambda: len(runs.metrics(hosts, out)) >= 1 or running[0].poll() is not None)
        hosts["c"].kill()
    with runs.serving(hosts):
        at = len(runs.metrics(hosts, out))
        jobs.until(lambda: len(runs.metrics(hosts, out)) >= at + 2 or running[0].poll() is not None)
        assert running[0].poll() is None, running[0].said
        hosts["b"].kill()
        began = time.monotonic()
        assert running[0].wait(80) == 3, running[0].said
        print(f"RL, a host without power: {time.monotonic() - began:.0f} s")
        assert re.search(r"process 1 of 2 \(pid \d+ on host-b\) cannot be reached", running[0].said)
        again = runs.job(hosts, "ab", runs.grpo(out, max(4, len(runs.metrics(hosts, out)) + 1)), f"{out}-again")
        assert [process.wait() for process in again] == [0, 0], again[0].said + again[1].said
    runs.equal(runs.metrics(hosts, out)[:4], calm)


def test_a_full_disk_at_the_trainers_second_host(hosts, calm):
    """Which has a part of each version in its own memory: the run names it."""
    for folder in ("/dev/shm", "/tmp"):
        hosts["b"].shell(f"mount -t tmpfs -o size=60k tmpfs {folder}")
    with runs.serving(hosts):
        running = runs.job(hosts, "ab", runs.grpo("rl-full-b", 3), "rl-full-b")
        assert [running[0].wait(), running[1].wait(60)] == [3, 2], running[0].said + running[1].said
        line = (
            r"process 1 of 2 \(pid \d+ on host-b\) ended: OSError: \[Errno 28\] No space left on device: '.*/model-000"
        )
        assert re.search(line, running[0].said), running[0].said
        assert "Traceback" not in running[0].said + running[1].said


def test_a_full_disk_at_the_server(hosts, calm):
    hosts["c"].shell("mkdir /tmp/small && mount -t tmpfs -o size=100k tmpfs /tmp/small")
    with runs.serving(hosts, "/tmp/small/versions"):
        running = runs.job(hosts, "ab", runs.grpo("rl-full", 3), "rl-full")
        assert running[0].wait() not in (0, None) and running[1].wait(60) not in (0, None), running[0].said
        assert "the disk is full" in running[0].said.splitlines()[-1], running[0].said
