"""How a job over several hosts starts, and what it says when it cannot."""

import re
import time

import jobs
import pytest
import runs


@pytest.fixture(autouse=True)
def place(network):
    return runs.prepare(network)


def test_in_any_order_and_far_apart(hosts):
    """By names, process 1 first; process 0's own name is 127.0.1.1 to it, and each host has an address that others do
    not reach."""
    words, at = runs.sft("apart", 2), f"host-a:{runs.COORDINATOR}"
    second = runs.start(hosts, "b", words, hosts.folder / "apart-b.log", 1, 2, at)
    second.until("process 1 of 2 (pid ", 60)
    time.sleep(5)
    first = runs.start(hosts, "a", words, hosts.folder / "apart-a.log", 0, 2, at)
    assert [first.wait(), second.wait()] == [0, 0], first.said + second.said
    assert re.search(
        r"process 1 of 2 \(pid \d+ on host-b\) cannot reach process 0 at host-a:9876 \(.*\), up to 300 s", second.said
    )
    assert len(runs.metrics(hosts, "apart")) == 2 and "Traceback" not in first.said + second.said


def test_a_firewall_that_drops_what_goes_to_process_0(hosts):
    hosts["a"].port.closed = {runs.COORDINATOR}
    hosts["b"]
    began = time.monotonic()
    first, second = runs.job(hosts, "ab", runs.sft("closed", 2), "closed", start_s=25)
    assert [first.wait(60), second.wait(60)] == [2, 2] and time.monotonic() - began < 60
    line = r"process 1 of 2 \(pid \d+ on host-b\) must reach process 0 at host-a:9876, could not in 25 s: timed out; is"
    assert re.search(line, second.said), second.said
    assert "all must start within 25 s, got no process 1 at host-a:9876;" in first.said, first.said
    assert "Traceback" not in first.said + second.said


def test_a_firewall_that_lets_only_the_coordinators_port_pass(hosts):
    hosts["a"].port.closed = set(range(1024, 1 << 16)) - {runs.COORDINATOR}
    hosts["b"].port.closed = set(range(1024, 32768))
    first, second = runs.job(hosts, "ab", runs.sft("narrow", 2), "narrow")
    assert second.wait(120) == 2 and first.wait(60) == 3, first.said + second.said
    assert re.search(
        r"hosts must reach each other on all ports, .* not at 10.78.0.1:\d+ \(timed out\); open", second.said
    )
    assert "process 1 of 2 (pid " in first.said and "ended: ValueError: processes: hosts must" in first.said, first.said


@pytest.mark.parametrize("twice", [0, 1])
def test_a_number_given_twice(hosts, twice):
    began, at = time.monotonic(), f"host-a:{runs.COORDINATOR}"
    given = {"a": 0, "d": 0} if twice == 0 else {"a": 0, "b": 1, "d": 1}
    running = [
        runs.start(hosts, name, runs.sft("twice", 2, 3), hosts.folder / f"twice-{twice}-{name}.log", number, 3, at)
        for name, number in given.items()
    ]
    line = f"each needs a number of its own, got {twice} twice: from pid "
    assert {process.wait(60) for process in running} == {2} and time.monotonic() - began < 60
    other = {0: "host-a", 1: "host-b"}[twice]
    for process in running:
        assert line in process.said and "Traceback" not in process.said, process.said
        assert f"on {other}" in process.said and "on host-d" in process.said, process.said


def test_hosts_with_clocks_hours_apart(hosts):
    """A calm run, and one whose clocks are wrong by five and by minus three hours."""
    late = lambda hours: {"WRONG_BY_S": str(hours * 3600)}
    for out, clocks in (("now", {}), ("then", {"a": late(5), "b": late(-3)})):
        running = runs.job(hosts, "ab", runs.sft(out, 4), out, environ=clocks)
        assert [process.wait() for process in running] == [0, 0], running[0].said + running[1].said
    runs.equal(runs.metrics(hosts, "then"), runs.metrics(hosts, "now"))
    jobs.until(lambda: (hosts.shared / "then/state/4").is_dir(), 5)
