"""Prefix routing: requests go to the server that has cached their prefix; compared with a naive model of the caches."""

import asyncio
import types

from hypothesis import given
from hypothesis import strategies as st
from scripted import V1, run, serving, until

from areax.rollout import client
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.prefix_routing import BLOCK, HOLDERS, RATIO, SAMPLED, SLACK, Cached, Recent, chain, choose
from areax.rollout.servers.server import Server
from areax.rollout.servers.sglang import SGLang
from areax.rollout.simulation import clock
from areax.rollout.simulation import server as rates

words = st.lists(st.integers(0, 1), max_size=5)  # two different blocks


def tokens(word, rest=0):
    return [block for block in word for _ in range(BLOCK)] + [7] * rest


@given(held=st.lists(words), asked=words, rest=st.integers(0, BLOCK - 1))
def test_a_match_is_the_longest_common_prefix_in_whole_blocks(held, asked, rest):
    cached = Cached()
    for word in held:
        cached.add(chain(tokens(word)))
    common = lambda word: next((i for i, (a, b) in enumerate(zip(word, asked, strict=False)) if a != b), None)
    longest = max((min(len(w), len(asked)) if (i := common(w)) is None else i for w in held), default=0)
    assert cached.match(chain(tokens(asked, rest))) == longest


@given(held=st.lists(words), most=st.integers(1, 6))
def test_least_recently_used_blocks_are_forgotten_leaves_first(held, most):
    cached = Cached(most * BLOCK)
    for word in held:
        cached.add(chain(tokens(word)))
        assert len(cached) <= most
        assert cached.match(chain(tokens(word))) == min(len(word), most)  # the prefix stays
    cached.clear()
    assert len(cached) == 0


@given(
    loads=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    held=st.lists(words, min_size=5, max_size=5),
    asked=words,
)
def test_the_longest_match_wins_unless_its_server_is_much_busier(loads, held, asked):
    fleet = [types.SimpleNamespace(load=load, cached=Cached()) for load in loads]
    for server, word in zip(fleet, held, strict=False):
        server.cached.add(chain(tokens(word)))
    hashes = chain(tokens(asked))
    chosen, least = choose(fleet, hashes), min(loads)
    near = [server for server in fleet if server.load <= least + SLACK or server.load <= RATIO * least]
    longest = max(server.cached.match(hashes) for server in near)
    assert chosen in near and chosen.cached.match(hashes) == longest
    assert chosen.load == min(server.load for server in near if server.cached.match(hashes) == longest)
    if longest == 0:
        assert chosen.load == least


def test_groups_share_a_server_turns_return_to_it_and_a_push_resets_routing(tmp_path):
    prompt = lambda i: tokens([0], rest=0)[:-1] + [i]

    async def main():
        async with serving() as a, serving() as b, client.connect([a.url, b.url]) as fleet:
            a.going.clear()
            b.going.clear()
            groups = [[asyncio.create_task(fleet.generate(prompt(i), max_new_tokens=70))] for i in range(4)]
            for i, group in enumerate(groups):
                group += [asyncio.create_task(fleet.generate(prompt(i), max_new_tokens=70)) for _ in range(3)]
            await until(lambda: a.load + b.load == 16)
            a.going.set()
            b.going.set()
            homes = [{(await task).info["url"] for task in group} for group in groups]
            assert all(len(home) == 1 for home in homes)
            assert a.load == b.load == 0 and len(a.generated()) == len(b.generated()) == 8
            # the next turn includes a generated block, which one server has; the first block is on both
            for i, [home] in enumerate(homes):
                other = next(server for server in fleet.servers if server.url != home)
                other.cached.add(chain(prompt(i)))
                turn = [*prompt(i), *(await groups[i][0]).tokens, 1, 2, 3]
                assert {(await fleet.generate(turn)).info["url"] for _ in range(3)} == {home}
            await push_weights(fleet, tmp_path, V1)
            assert all(len(server.cached) == 0 for server in fleet.servers)
            fleet.servers[0].cached.add([1])
            fleet.fail(fleet.servers[0], "stale", "it lies")
            assert len(fleet.servers[0].cached) == 0

    run(main)


def test_of_very_many_servers_a_sample_and_those_with_the_prompt_are_compared():
    class One:
        def __init__(self):
            self.load, self.cached = 0, Cached()

    servers, recent, homes, found = [One() for _ in range(1000)], Recent(), {}, 0
    for i in range(8000):  # samples of 1000 prompts, eight each, in turn
        hashes = chain([i % 1000] * BLOCK)
        few = recent.candidates(servers, hashes)
        assert len(few) <= SAMPLED + HOLDERS
        server = choose(few, hashes)
        found += homes.setdefault(i % 1000, server) is server
        server.cached.add(hashes)
        recent.add(hashes, server)
        server.load += 1
    assert found > 7500 and max(server.load for server in servers) <= 8 + SLACK
    gone = homes[0]
    servers.remove(gone)
    assert gone not in recent.candidates(servers, chain([0] * BLOCK))


def sessions(routed, *, episodes=48, turns=6):
    """(seconds, prefilled tokens) of episodes on three servers; turns are routed by prefix, or to any server."""

    async def main():
        speed = rates.Rates(slots=16, step_s=0.01, request_s=0.0, read_tokens_s=5000.0)
        network = clock.Network({f"http://{i}": rates.Server(speed) for i in range(3)})
        fleet = client.assemble([Server(SGLang(url, network), ["default"]) for url in network.servers])

        async def episode(i):
            context = [i] * 500
            for turn in range(turns):
                if not routed:
                    for server in fleet.servers:
                        server.cached.clear()
                done = await fleet.generate(context, max_new_tokens=20 + 7 * ((i + turn) % 5))
                context = [*context, *done.tokens, *[i] * 200]
                await asyncio.sleep(0.1 * (1 + (5 * i + 3 * turn) % 7))  # a tool call

        await asyncio.gather(*(episode(i) for i in range(episodes)))
        await fleet.close()
        return asyncio.get_running_loop().time(), sum(server.read for server in network.servers.values())

    return clock.run(main())


def test_prefix_routing_prefills_little_more_than_new_tokens():
    """Without it, most turns reach a server that has to prefill the whole conversation."""
    (there_s, there), (anywhere_s, anywhere) = sessions(True), sessions(False)
    new = 48 * (500 + 5 * 200)
    assert there < 1.2 * new < 2 * new < anywhere and there_s < 0.7 * anywhere_s
