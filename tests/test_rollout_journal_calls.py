"""What is recorded of an episode's calls comes back, and a completion goes on from it."""

import asyncio
import contextlib
import json
import sqlite3

import pytest
from scripted import V0, V1, aiohttp, check, logp_at, reply, run, serving, token_at, until
from test_rollout_journal_store import opened, sample

from areax.rollout import client
from areax.rollout.fleet import fleet as fleets
from areax.rollout.journal import calls, store
from areax.rollout.simulation import clock
from areax.rollout.types import Generated

REQUEST = lambda: "request"


def made(n, version=0, finish=None, first=2):
    """The tokens that `serving` gives behind a prompt of `first` tokens."""
    places = range(first, first + n)
    return Generated([*map(token_at, places)], [*map(logp_at, places)], [version] * n, finish)


def recorded(folder, *kept, episode=0):
    """Records of an episode, (seconds since the one before, number of the call, its tokens); returns the calls that
    a next process finds, by number."""

    async def write(journal):
        journal.begin(7, 0, "row")
        one = calls.Calls(journal, 7, 0, {}, True, episode)
        of = {}
        for seconds, number, tokens in kept:
            await asyncio.sleep(seconds)
            while number not in of:
                of[len(of)] = one.next()
            of[number].keep(REQUEST, tokens)

    opened(folder, write)
    return {number: call.made for (_, number), call in opened(folder).begun[7].calls.items()}


@pytest.fixture
def seconds(monkeypatch):
    monkeypatch.setattr(calls, "SECONDS", 0.1)


def rows(folder):
    with contextlib.closing(sqlite3.connect(folder / store.FILE)) as db:
        return db.execute("SELECT call, start, length(tokens) FROM calls ORDER BY call, start").fetchall()


def test_an_episode_that_ends_within_the_interval_is_not_recorded(tmp_path, seconds):
    assert recorded(tmp_path, (0, 0, made(5)), (0, 0, made(9, finish="stop")), (0, 1, made(3, finish="stop"))) == {}


def test_only_new_tokens_are_recorded_each_time(tmp_path, seconds):
    done = made(3, finish="stop")
    found = recorded(
        tmp_path, (0, 0, done), (0, 1, made(10)), (0.12, 1, made(40)), (0.05, 1, made(50)), (0.12, 1, made(90))
    )
    assert found == {0: done, 1: made(90)}
    assert [row[:2] for row in rows(tmp_path)] == [(0, 0), (1, 0), (1, 40)]


def test_tokens_that_were_sampled_anew_replace_those_recorded(tmp_path, seconds):
    other = made(60, first=9)
    found = recorded(tmp_path, (0, 0, made(10)), (0.12, 0, made(40)), (0.12, 0, made(50)), (0.12, 0, other))
    assert found == {0: other} and len(rows(tmp_path)) == 1


def test_a_damaged_record_loses_what_is_behind_it(tmp_path, seconds, caplog):
    recorded(tmp_path, (0, 0, made(10)), (0.12, 0, made(40)), (0.12, 0, made(50)), (0.12, 0, made(70)))
    with contextlib.closing(sqlite3.connect(tmp_path / store.FILE)) as db, db:
        db.execute("UPDATE calls SET tokens = x'00' WHERE start = 40")
    assert opened(tmp_path).begun[7].calls == {(0, 0): store.Call("request", made(40))}
    assert ["call 0 of episode 0 of prompt 7 is generated again from token" in line for line in caplog.messages] == [
        True
    ] * 2


@pytest.mark.parametrize("end", ["episode", "group", "anew", "run"])
def test_records_end_with_what_they_belong_to(tmp_path, seconds, end):
    recorded(tmp_path, (0, 0, made(10)), (0.12, 0, made(40)))

    async def ended(journal):
        if end == "episode":
            journal.keep(7, 0, "row", 0, [sample()], 1.0)
        elif end == "group":
            journal.close_batch(0, [[sample()]], {}, [7]).result()
        elif end == "anew":
            journal.begin(7, 1, "row")

    opened(tmp_path, ended, run="other" if end == "run" else "one")
    assert not rows(tmp_path)


def test_tokens_of_versions_that_are_not_made_yet_are_not_used():
    call = store.Call("request", Generated([1, 2, 3], [-1.0] * 3, [0, 1, 2], "stop"))
    assert call.until(2) == call
    assert call.until(1).made == Generated([1, 2], [-1.0] * 2, [0, 1]) and call.until(0).made.tokens == [1]


class Kept:
    """A record in memory."""

    grows = True

    def __init__(self, begun=None):
        self.known, self.made, self.requests = begun, [], set()

    def begun(self, request):
        self.requests.add(request())
        return self.known

    def keep(self, request, made):
        self.requests.add(request())
        self.made.append(made)


@pytest.mark.parametrize("more, at", [({}, 8), ({"stop": ["four"]}, 6), ({"frequency_penalty": 0.5}, 0)])
def test_a_request_goes_on_behind_the_recorded_tokens(more, at):
    """But not behind the last one, which may have ended it, or those that could be part of a stop string."""

    async def main():
        async with serving(seeded=True) as a, client.connect([a.url]) as fleet:
            record = Kept(made(9))
            done = await fleet.generate([1, 2], max_new_tokens=20, seed=3, record=record, **more)
            check(done, [1, 2], 20)
            [body] = a.generated()
            assert body["input_ids"] == [1, 2, *done.tokens[:at]] and fleet.counts["recalled"] == at
            assert body["sampling_params"]["max_new_tokens"] == 20 - at
            last = [made(20, finish=None if "stop" in more else "length")]
            assert record.made == (last if at else []) and done.finish == "length"

    run(main)


def test_a_completion_that_has_ended_needs_no_server():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            done = await fleet.generate([1, 2], max_new_tokens=20, record=Kept(made(9, 0, "stop")))
            check(done, [1, 2], 9)
            assert done.finish == "stop" and not a.generated()

    run(main)


def test_a_request_is_known_by_all_that_its_tokens_depend_on():
    async def main():
        async with serving(seeded=True) as a, client.connect([a.url]) as fleet:

            async def request(tokens=(1, 2), **more):
                record = Kept()
                await fleet.generate(tokens, record=record, **{"max_new_tokens": 4, "seed": 5} | more)
                [found] = record.requests
                return found

            others = [{"tokens": (1, 3)}, {"max_new_tokens": 5}, {"seed": 6}, {"temperature": 0.5}, {"stop": ["a"]}]
            assert await request() == await request() and await request(seed=None) == await request(seed=None)
            assert len({await request(), *[await request(**other) for other in others]}) == 1 + len(others)

    run(main)


def streams(versions, gate):
    """Answers like SGLang, which says no versions before the end; `areax serve` does."""

    async def handler(request, body):
        assert body["stream"] and body["sampling_params"]["stream_interval"] == 4
        reply_ = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply_.prepare(request)
        for n in (1, 5, 9, 12):
            await gate(n)
            ids, logp = made(n)[:2]
            event = reply(ids, logp, [versions[0]] * min(n, 5) + [versions[1]] * (n - 5), "length")
            event["meta_info"] |= {"weight_version": versions[n > 5]}
            if n < 12:
                event["meta_info"]["finish_reason"] = None
                if versions[0] == versions[1] or versions[2] == "silent":
                    del event["meta_info"]["weight_versions"]
            await reply_.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await reply_.write(b"data: [DONE]\n\n")
        return reply_

    return handler


@pytest.mark.parametrize(
    "versions, lengths", [((V0, V0, ""), [1, 5, 9]), ((V0, V1, ""), [1, 5, 9]), ((V0, V1, "silent"), [1, 5])]
)
def test_a_long_answer_is_recorded_while_it_grows(monkeypatch, versions, lengths):
    """A push arrives behind token 5; a server that does not say versions gives no more records then."""
    monkeypatch.setattr(fleets, "EVERY", 4)

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            [server] = fleet.servers

            record = Kept()

            async def gate(n):
                if n == 9 and versions[1] == V1 and V1 not in server.labels:
                    await until(lambda: len(record.made) == 2)
                    server.labels.append(V1)

            a.script = [streams(versions, gate)]
            done = await fleet.generate([1, 2], max_new_tokens=12, record=record)
            check(done, [1, 2], 12)
            assert [len(one.tokens) for one in record.made] == [*lengths, 12]
            assert all(one[:3] == tuple(x[: len(one.tokens)] for x in record.made[-1][:3]) for one in record.made)
            a.script = [streams(versions, gate)]
            server.weights_verified.clear()  # new weights must be verified first
            waiting = asyncio.create_task(fleet.generate([1, 2], max_new_tokens=12, record=(record := Kept())))
            await until(lambda: not a.script and not a.load)
            assert not record.made
            server.weights_verified.set()
            await waiting
            short = await fleet.generate([1, 2], max_new_tokens=4, record=Kept())
            check(short, [1, 2], 4)
            assert "stream" not in a.generated()[-1]

    run(main)


def test_calls_of_an_executor_are_recorded_by_the_clock(tmp_path):
    """The default interval, on a virtual clock: a completion of 25 s has two records."""
    put = []

    class Journal:
        def keep_calls(self, prompt, admitted, episode, made):
            put.append((asyncio.get_running_loop().time(), [*made]))

    async def main():
        one = calls.Calls(Journal(), 7, 0, {}, True, 0).next()
        for second in range(26):
            one.keep(REQUEST, made(second + 1))
            await asyncio.sleep(1)

    clock.run(main())
    begun = put[0][0] - 10
    assert [(at - begun, keys) for at, keys in put] == [(10, [(0, 0)]), (20, [(0, 11)])]
