"""A run whose servers come and go ends as one whose servers stay."""

import contextlib
import itertools
import threading
import time

import jax
import numpy as np
import pytest
import servers
import tiny

from areax.adapters import hf
from areax.adapters.command_line.options import replaced
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import grpo
from areax.rollout import client
from areax.rollout.fleet import members
from areax.rollout.tasks import arithmetic
from areax.rollout.types import Sampling

TIMES = 30
LISTED = ((0, 1), (2,), (), (0,), (1, 2), (0, 2), (1,), (), (0, 1, 2))  # servers in the file, in turn


@pytest.mark.long
def test_servers_that_join_and_leave_change_no_parameter(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "EVERY_S", 0.02)
    tiny.model(tmp_path / "model")
    tiny.rows(tmp_path / "rows.jsonl", arithmetic.splits()["train"][:40])
    own = replaced(
        grpo.Config(str(tmp_path / "model"), str(tmp_path / "rows.jsonl"), "areax.rollout.tasks.arithmetic:reward"),
        steps=80, groups=4, group_size=4, max_concurrent=8, length=32, rows=4, eta=0, optim=Optimizer(lr=1e-3),
        sampling=Sampling(max_new_tokens=4), objective=GRPO(advantage={"std": "none"}),
    )  # fmt: skip
    file, fleets, over, assemble = tmp_path / "servers", [], threading.Event(), client.assemble
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(servers.embedded(tmp_path / "model", slots=8, context=64)).url for _ in range(3)]
        grpo.main(replaced(own, out=str(tmp_path / "fixed"), servers=(*urls,)))
        monkeypatch.setattr(client, "assemble", lambda *a, **k: fleets.append(assemble(*a, **k)) or fleets[-1])

        def change():
            for listed in itertools.cycle(LISTED):
                file.write_text("".join(f"{urls[i]}\n" for i in listed))
                while not fleets or {server.url for server in fleets[0].servers} != {urls[i] for i in listed}:
                    if over.is_set():
                        return
                    time.sleep(0.01)

        file.write_text(f"{urls[0]}\n")
        changing = threading.Thread(target=change)
        changing.start()
        try:
            grpo.main(replaced(own, out=str(tmp_path / "changing"), servers=(f"@{file}",)))
        finally:
            over.set()
            changing.join()
    counts = fleets[0].counts
    assert counts["joined"] >= TIMES and counts["left"] >= TIMES, counts
    for a, b in zip(
        *(jax.tree.leaves(hf.load(tmp_path / name / "model")[1]) for name in ("fixed", "changing")), strict=True
    ):
        np.testing.assert_array_equal(a, b)
