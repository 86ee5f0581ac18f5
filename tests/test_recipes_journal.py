"""The journal of a run: what a killed process has recorded is neither made again nor changed."""

import asyncio
import itertools
import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import kill_at_records
import numpy as np
import pytest
import scripted
import servers
import test_recipes_grpo as runs
import tiny
import xxhash

from areax.adapters.tracking import run_dir
from areax.recipes import grpo
from areax.rollout.fleet.push import Push
from areax.rollout.scheduling.episodes import sampling_seed
from areax.rollout.servers.labels import version_of
from areax.rollout.servers.local import Serve
from areax.rollout.tasks import arithmetic
from areax.rollout.types import Sampling

SAME = {"step", "kind", "reward", "loss", "grad_norm", "entropy", "kl", "samples", "length", "staleness_max", "ratio"}
STEPS, GROUPS, SIZE = 12, 2, 4
OFTEN = {"areax.rollout.journal.calls:SECONDS": 0.0, "areax.rollout.fleet.fleet:EVERY": 1}  # records of calls


@pytest.fixture
def place(tmp_path):
    path = tmp_path
    tiny.model(path / "model")
    tiny.rows(path / "rows.jsonl", arithmetic.splits()["train"][:40])
    (path / "rewards.py").write_text("def score(text, row):\n    return sum(c.isdigit() for c in text) / 4\n")
    (path / "url").write_text("")  # for `runs.config`
    return path


def config(place, out, url="", **changes):
    """Of a server, or of one that the run starts."""
    own = dict(servers=(url,)) if url else dict(servers=(), serve=Serve(slots=8, context=64, restarts=99))
    given = dict(steps=STEPS, groups=GROUPS, save_every=5, samples_every=0) | own | changes
    return runs.config(Path(place), out, **given)


def of_a_script(place, out, url, eta):
    """Of `script`, which cannot compute what a push is proved with."""
    return config(place, out, url, eta=eta, max_concurrent=2 * GROUPS, push=Push(tolerance=0), save_every=4)


def of_steps(place, out, steps):
    return config(place, out, steps=steps)


def of_two_turns(place, out, url):
    workflow = {"workflow": "areax.rollout.workflows.multi_turn:multi_turn", "workflow_options": '{"turns": 2}'}
    return config(place, out, url, steps=5, length=64, sampling=Sampling(max_new_tokens=12), **workflow)


def killed(place, function, *arguments, deaths=(), **job):
    """The lines that a run's processes have written, which were killed at these records."""
    job |= {"module": "test_recipes_journal", "function": function, "deaths": [*deaths], "log": f"{place}/log"}
    (place / "log").write_text("")
    (place / "job.json").write_text(json.dumps(job | {"arguments": [str(place), "killed", *arguments]}))
    done = subprocess.run([sys.executable, kill_at_records.__file__, str(place / "job.json")], stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [line.split(maxsplit=1) for line in (place / "log").read_text().splitlines()]


def check(place, said, steps=STEPS):
    """Parameters and metrics are those of the run that was not killed, and each episode was kept once."""
    for a, b in zip(runs.leaves(place / "whole/model"), runs.leaves(place / "killed/model"), strict=True):
        np.testing.assert_array_equal(a, b)
    whole, other = ([*run_dir.read_lines(place / run / "metrics.jsonl")] for run in ("whole", "killed"))
    for one, two in zip(whole, other, strict=True):
        assert {name: one[name] for name in SAME & one.keys()} == {name: two[name] for name in SAME & two.keys()}
    kept = set()
    for what, name in said:
        assert not (what == "generated" and name in kept), f"{name} was generated again"
        kept |= {name} if what == "kept" else set()
    wanted = {f"{prompt}/{i}" for prompt in range(steps * GROUPS) for i in range(SIZE)}
    assert {name for what, name in said if what == "generated"} == wanted


@pytest.mark.long
def test_a_run_killed_at_many_records_is_the_run_that_was_not(place):
    chance = random.Random(0)
    with servers.embedded(place / "model", slots=8, context=64) as remote:
        grpo.main(config(place, "whole", remote.url))
        said = killed(place, "config", remote.url, deaths=[chance.randint(1, 3) for _ in range(50)])
    check(place, said)
    assert sum(what == "process" for what, _ in said) > 50


def recalled(said):
    """The (tokens, finish) of calls that a process took from its journal: those that the former one had left there."""
    there, left, taken = {}, {}, []
    for what, of in said:
        place, *rest = of.split()
        if what == "process":
            there, left = left, {}
        elif what == "left":
            left[place] = rest
        elif what == "recalled":
            assert there.pop(place) == rest
            taken.append((int(rest[0]), rest[1]))
    return taken


@pytest.mark.long
def test_at_eta_0_a_killed_run_has_its_calls_again_without_generating_them(place):
    with servers.embedded(place / "model", slots=8, context=64) as remote:
        grpo.main(of_two_turns(place, "whole", remote.url))
        said = killed(place, "of_two_turns", remote.url, deaths=[9, 30, 17, 44, 25, 60], patched=OFTEN)
    check(place, said, 5)
    taken = recalled(said)
    assert len(taken) > 5 and "None" not in dict(taken).values()


@pytest.mark.long
@pytest.mark.parametrize(("steps", "each", "times"), [(5, 9, 2), (56, 4, 50)])
def test_killed_servers_and_reward_workers_change_nothing(place, steps, each, times):
    others = ["areax.rollout.rewards.worker", "-m areax serve"]
    grpo.main(of_steps(place, "whole", steps))
    said = killed(place, "of_steps", steps, deaths=[23], others=others, each=each)
    check(place, said, steps)
    assert all(said.count(["killed", word]) >= times for word in others)


def schedule(eta):
    """{prompt: the version with which the server answers it}: the batch that takes it. At eta 4, of four open groups a
    batch takes the oldest and another; at eta 1 all are admitted early, and the bound orders them."""
    chance, made, waiting = random.Random(0), {}, [0, 1, 2, 3]
    later = iter(range(4, STEPS * GROUPS))
    for v in range(STEPS):
        taken = waiting[:GROUPS] if eta == 1 and v else [waiting[0], chance.choice(waiting[1:])]
        made |= dict.fromkeys(taken, v)
        waiting = [prompt for prompt in waiting if prompt not in taken] + [*itertools.islice(later, GROUPS)]
    return made


@pytest.fixture
def script(request):
    """A server whose tokens are a function of prompt, episode, version and place, and so is when it gives them."""
    begun, ended, found, lengths = threading.Event(), asyncio.Event(), {}, {}  # of prompts, which come whole at first
    versions = schedule(request.param)
    of_seed = {sampling_seed(0, p, i, 0): (p, i) for p in range(STEPS * GROUPS) for i in range(SIZE)}

    async def main():
        async with scripted.serving(seeded=True) as server:

            async def answer(request, body):
                prompt, episode = of_seed[body["sampling_params"]["sampling_seed"]]
                await scripted.until(lambda: version_of(server.label) >= versions[prompt])
                label = server.label
                draw = lambda i: xxhash.xxh3_64_intdigest(repr((prompt, episode, version_of(label), i)).encode())
                start = len(body["input_ids"]) - lengths.setdefault(prompt, len(body["input_ids"]))
                made, going_on = list[int](), scripted.aiohttp.web.StreamResponse()
                if body.get("stream"):
                    await going_on.prepare(request)
                for i in range(start, 4):
                    await asyncio.sleep(draw(9) % 100 / 4000)
                    made.append(i)
                    ids, logp = [8 + draw(i) % 11 for i in made], [-(draw(i) % 31) / 8 for i in made]  # of sums
                    event = scripted.reply(ids, logp, [label] * len(ids), "length")
                    event["meta_info"] |= {"finish_reason": None} if i < 3 else {}
                    if body.get("stream"):
                        await going_on.write(
                            b"data: " + json.dumps(event).encode() + b"\n\n" + b"data: [DONE]\n\n" * (i == 3)
                        )
                return going_on if body.get("stream") else scripted.aiohttp.web.json_response(event)

            server.script = type("Always", (), {"pop": lambda self, _: answer})()
            found["url"], found["loop"] = server.url, asyncio.get_running_loop()
            begun.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=[main()])
    thread.start()
    begun.wait(20)
    yield found["url"], request.param
    found["loop"].call_soon_threadsafe(ended.set)
    thread.join()


@pytest.mark.long
@pytest.mark.parametrize("often", [{}, OFTEN])
@pytest.mark.parametrize("script", [1, 4], indirect=True)
def test_with_eta_a_killed_run_is_the_run_that_was_not(place, script, often):
    url, eta = script
    chance = random.Random(eta)
    grpo.main(of_a_script(place, "whole", url, eta))
    deaths = [chance.randint(1, 60 if often else 30) for _ in range(10)]
    said = killed(place, "of_a_script", url, eta, deaths=deaths, patched=often)
    check(place, said)
    assert bool(often) == any(finish == "None" for _, finish in recalled(said))  # it went on behind their tokens
