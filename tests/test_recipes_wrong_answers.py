"""A run whose server answers wrongly in every way that is known here ends as one whose server does not."""

import asyncio
import contextlib
import json
import math
import threading

import aiohttp
import aiohttp.web
import jax
import numpy as np
import pytest
import servers
import tiny

from areax.adapters import hf
from areax.adapters.command_line.options import replaced
from areax.adapters.tracking import run_dir
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import grpo
from areax.rollout.scheduling import episodes
from areax.rollout.tasks import arithmetic
from areax.rollout.types import Sampling

STEPS = 200

WRONG = {  # what a proxy makes of a right answer: bytes of another body, a status, or both
    "an id beyond the vocabulary": lambda a: a["output_ids"].__setitem__(0, 2**40),
    "a negative id": lambda a: a["output_ids"].__setitem__(0, -7),
    "half an id": lambda a: a["output_ids"].__setitem__(0, 5.5),
    "a text for an id": lambda a: a["output_ids"].__setitem__(0, "5"),
    "another id than scored": lambda a: a["output_ids"].__setitem__(0, a["output_ids"][0] ^ 1),
    "no ids": lambda a: a.pop("output_ids"),
    "logp above 0": lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, 0.5),
    "logp NaN": lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, math.nan),
    "logp infinite": lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, -math.inf),
    "no logp": lambda a: a["meta_info"]["output_token_logprobs"].pop(),
    "no versions": lambda a: a["meta_info"].pop("weight_versions"),
    "a gap of versions": lambda a: a["meta_info"]["weight_versions"][0].update(start=1),
    "an unknown finish": lambda a: a["meta_info"]["finish_reason"].update(type="tired"),
    "a finish that is an error": lambda a: a["meta_info"].update(finish_reason={"type": "error", "message": "memory"}),
    "a stop without a stop token": lambda a: a["meta_info"].update(finish_reason={"type": "stop", "matched": -1}),
    "no token": lambda a: a.update(output_ids=[], meta_info={**a["meta_info"], "output_token_logprobs": []}),
    "no name": lambda a: a["meta_info"].pop("id"),
    "another prompt's length": lambda a: a["meta_info"].update(prompt_tokens=1),
    "logp of a masked token": lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, -3.4e38),
    "a refusal by a proxy": (403, b"<html>Forbidden</html>"),
    "no finish": lambda a: a["meta_info"].update(finish_reason=None),
    "no report": lambda a: a.update(meta_info=None),
    "no UTF-8": b'{"output_ids": "\xff"}',
    "no JSON": b'{"output_ids": [1, 2',
    "too deep": b"[" * 10_000,
    "a list": b"[]",
    "nothing": b"",
    **{f"status {code}": code for code in (302, 408, 425, 429, 500, 502, 503, 504)},
}


@contextlib.contextmanager
def misreporting(url):
    """A proxy of a server that answers each twentieth new request wrongly, in every way of WRONG in turn; yields its
    address and the ways that it has used."""
    used, seen, loop = [], set(), asyncio.new_event_loop()

    async def handler(request):
        body = await request.read()
        async with aiohttp.ClientSession() as http:
            async with http.request(request.method, f"{url}{request.path_qs}", data=body) as reply:
                data, status = await reply.read(), reply.status
        if request.path == "/generate" and status == 200 and body not in seen:
            seen.add(body)
            if len(seen) % 20 == 0:
                way = [*WRONG][len(used) % len(WRONG)]
                used.append(way)
                wrong = WRONG[way]
                if isinstance(wrong, int):
                    return aiohttp.web.Response(status=wrong, headers={"Location": "/", "Retry-After": "0"})
                if isinstance(wrong, tuple):
                    return aiohttp.web.Response(status=wrong[0], body=wrong[1], content_type="text/html")
                if isinstance(wrong, bytes):
                    return aiohttp.web.Response(body=wrong, content_type="application/json")
                wrong(answer := json.loads(data))
                data = json.dumps(answer).encode()
        return aiohttp.web.Response(body=data, status=status, content_type="application/json")

    async def start():
        app = aiohttp.web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", handler)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", used
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.long
def test_wrong_answers_of_every_kind_change_no_parameter(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(episodes, "PAUSE_S", 0.01)
    tiny.model(tmp_path / "model")
    tiny.rows(tmp_path / "rows.jsonl", arithmetic.splits()["train"][:40])
    own = replaced(
        grpo.Config(str(tmp_path / "model"), str(tmp_path / "rows.jsonl"), "areax.rollout.tasks.arithmetic:reward"),
        steps=STEPS, groups=4, group_size=4, max_concurrent=8, length=32, rows=4, eta=0, optim=Optimizer(lr=1e-3),
        sampling=Sampling(max_new_tokens=4), objective=GRPO(advantage={"std": "none"}),
    )  # fmt: skip
    with servers.embedded(tmp_path / "model", slots=8, context=64) as remote:
        grpo.main(replaced(own, out=str(tmp_path / "right"), servers=(remote.url,)))
        with misreporting(remote.url) as (url, used):
            grpo.main(replaced(own, out=str(tmp_path / "wrong"), servers=(url,)))
    assert {*used} == {*WRONG} and len(used) > 3 * len(WRONG)
    for a, b in zip(
        *(jax.tree.leaves(hf.load(tmp_path / name / "model")[1]) for name in ("right", "wrong")), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    lines = [x for x in run_dir.read_lines(tmp_path / "wrong/metrics.jsonl") if x["kind"] == "grpo"]
    assert len(lines) == STEPS and not any("nonfinite" in line for line in lines)
    refused = [text for record in caplog.records if "attempt 1: " in (text := record.getMessage())]
    assert refused and all(f"attempt 1: {url}/generate: " in text for text in refused)
