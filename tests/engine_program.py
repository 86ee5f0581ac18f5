"""Generates with an engine over the processes of a job: python engine_program.py CASE MESH DRAFT."""

import dataclasses
import json
import sys

import numpy as np
import tiny

from areax import models
from areax.models import lora
from areax.rollout.engine import hosts
from areax.rollout.servers.engine_mesh import EngineMesh


def over_devices(case, mesh, draft):
    """An engine whose caches do not hold what its requests need."""
    import test_rollout_engine_images as seeing  # these compute, so the job must have been joined
    import test_rollout_engine_mesh as plain
    import test_rollout_engine_programs_mtp_drafts as predicting

    split = EngineMesh(**json.loads(mesh))
    if case in seeing.vlm.CASES:
        return seeing.engine_of(case, 0.4, draft=int(draft), mesh=split)
    if case == "glm4_moe":
        return predicting.engine_of(case, 0.4, draft=int(draft), mesh=split)
    return plain.engine_of(case, split, 0.4, int(draft))


def generate(engine, case):
    """What requests with little memory give, then some with adapters, more than the arrays begin with."""
    import test_rollout_engine_images as seeing
    from test_rollout_engine_pages import requests as texts

    requests = seeing.requests if case in seeing.vlm.CASES else texts
    made = engine.generate(requests(case))
    assert engine.stats()["preemptions"] > 0
    if "moe" not in case:
        spec = lora.Lora(rank=3)
        names = [str(i) for i in range(5)]
        for seed, name in enumerate(names):
            tree = tiny.weights(lora.table(models.table(engine.config), spec), 0.2, seed)
            engine.load_adapter(name, spec, tree)
        made += engine.generate([dataclasses.replace(requests(case)[2], rid=n, adapter=n) for n in names])
        for name in names:
            engine.unload_adapter(name)
        made += engine.generate(requests(case)[:1])
    return [[one.tokens, one.logp, one.input_logp, np.array(one.routed).tolist()] for one in made]


if __name__ == "__main__":
    with hosts.joined() as (index, share):
        engine = over_devices(*sys.argv[1:])
        engine.share = share
        if index > 0:
            engine.device.follow(share)
        else:
            with hosts.serving(engine):
                print(f"\nRESULT {json.dumps(generate(engine, sys.argv[1]))}")
