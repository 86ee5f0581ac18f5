"""What the processes of test_parallel_multihost_processes.py run: python job_program.py FUNCTION ARGUMENTS."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import scripted

from areax import models
from areax.adapters import hf, orbax, tokenizer
from areax.adapters.command_line.options import replaced
from areax.core import losses, optim, param, step
from areax.models import lora
from areax.parallel import batches, mesh, rules
from areax.parallel.multihost import agreement, lockstep, processes
from areax.recipes import grpo, preference
from areax.recipes.shared import common, learner, publishing, score_head, trainer
from areax.rollout import client
from areax.rollout.servers import answers
from areax.rollout.types import Completion, sampled
from areax.rollout.weights import http_source

# Adam that is gradient descent: steps compare as gradients do.
PLAIN = optim.Optimizer(lr=1e4, b1=0.0, b2=0.0, eps=1e5)
GENTLE = optim.Optimizer(lr=1e2, b1=0.0, b2=0.0, eps=1e5)  # for a critic, whose steps move the policy's ratios to 80


def groups(seed: int) -> list:
    """Four groups of four completions of unequal lengths, sampled by nobody."""
    rng = np.random.default_rng(seed)

    def one(group, i):
        n = int(rng.integers(2, 12))
        done = Completion(rng.integers(5, 16, n).tolist(), (-3 * rng.random(n)).tolist(), [0] * n, "stop")
        ids = {"group": group, "rollout": i, "sample": i, "info": {"stays here": lambda: None}}
        return sampled([5, 6, 7], done, temperature=1.0, reward=float(rng.random()), **ids).replace(prompt=group)

    return [[one(g, 4 * g + i) for i in range(4)] for g in range(4)]


BESIDE = {  # what trains or speaks beside the policy
    "reference": lambda model: dict(objective=losses.GRPO(advantage={"std": "none"}, kl={"coef": 0.1})),
    "critic": lambda model: dict(
        objective=losses.PPO(kl={"coef": 0.1, "target": 0.05}), critic=trainer.CriticOptions(optim=GENTLE)
    ),
    "teacher": lambda model: dict(objective=losses.GRPO(advantage={"std": "none", "teacher": 0.5}), teacher=model),
    "adapters": lambda model: dict(
        objective=losses.GRPO(advantage={"std": "none"}, kl={"coef": 0.1}), lora=lora.Lora(rank=4)
    ),
    "tries": lambda model: dict(trie="auto", objective=losses.GRPO(advantage={"std": "none"}, kl={"coef": 0.1})),
    "moving reference": lambda model: dict(
        objective=losses.GRPO(advantage={"std": "none"}, kl={"coef": 0.1}), reference_every=1, reference_mix=0.5
    ),
}


def grpo_steps(model: str, layout: str, out: str, beside: str = "reference") -> list[dict]:
    """Three steps on groups that process 0 alone has; writes the weights, and returns the metrics."""
    config = replaced(
        grpo.Config(model, data="", reward=""), steps=3, groups=4, group_size=4, length=32, rows=4, minibatches=2,
        optim=PLAIN, mesh=mesh.Layout(**json.loads(layout)), **BESIDE[beside](model),
    )  # fmt: skip
    learning = grpo.build_trainer(config)
    work = {
        "update": functools.partial(trainer.train_packed, learning),
        "write": lambda: hf.save(out, learning.policy.settings, learner.weights(learning.policy)),
    }
    if jax.process_index() > 0:
        lockstep.worker_loop(work)
        return []
    with lockstep.leader(work) as run_on_all:
        run = functools.partial(run_on_all, "update")
        reports = [trainer.train_on_batch(learning, groups(i), run) for i in range(3)]
        run_on_all("write")
    return [{k: v for k, v in report.items() if isinstance(v, float)} for report in reports]


def push_in_parts(model: str, stager: str, folder: str, most: str = "0") -> list[dict] | None:
    """Two versions to a server with a stager; of each its label, the bytes that were fetched, and the files that each
    process serves. Whole ones are written to `folder`, too. Process 1 cannot write files of more than `most` bytes."""
    config = replaced(
        grpo.Config(model, data="", reward=""), steps=2, length=32, rows=4, out=folder, mesh=mesh.Layout(fsdp=2),
        servers=("http://127.0.0.1:1",), stagers=(stager,),
    )  # fmt: skip
    learning, tokens = grpo.build_trainer(config), tokenizer.load(model)

    def nudge(v: int) -> None:
        state = learning.policy.state
        params = jax.tree.map(lambda x: x * (1 + v * 1e-6), state.params)
        learning.policy.state = dataclasses.replace(state, params=params)

    def limit() -> None:
        if jax.process_index() == 1 and int(most):
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(most),) * 2)

    with orbax.open_store(f"{folder}/state") as store, contextlib.ExitStack() as stack:
        work = grpo.collective(config, learning, store, tokens, stack) | {"nudge": nudge, "limit": limit}
        if jax.process_index() > 0:
            lockstep.worker_loop(work)
            return None
        with lockstep.leader(work) as run_on_all:
            run_on_all("limit")
            return asyncio.run(_pushed(config, learning, run_on_all, tokens))


async def _pushed(config: grpo.Config, learning, run_on_all, tokens) -> list[dict]:
    made, serving = [], config.serving
    async with (
        scripted.serving() as server,
        publishing.opened(config.model, serving, learning.policy, run_on_all, tokens, "run", 0, None) as sync,
        client.connect([server.url], stagers=serving.stagers, source=sync.parts) as fleet,
    ):
        for v in range(2):
            run_on_all("nudge", v)
            await publishing.prepare_push(sync, fleet, (), v)()
            run_on_all("publish", Path(config.out), v)
            told = await sync.parts.offered(fleet.published)
            async with http_source.session(told["source_key"]) as http:
                urls = [f"{url}/{fleet.published.label}" for url in told["sources"]]
                served = [(await http_source.asked(http, "GET", url))["files"] for url in urls]
            made.append({"label": server.label, "path": server.source, "served": served})
    return made


MARKED, TOKEN, MARK = 9, 4, -7.25  # a sample and its token that a loss knows by its log-probability


def marked(logp: float = MARK) -> list:
    """`groups` with this log-probability at the marked token, and an id for its sample's row."""

    def one(sample):
        if sample.sample != MARKED:
            return sample
        logps = [logp if t == TOKEN else x for t, x in enumerate(sample.logp.tolist())]
        return sample.replace(logp=np.array(logps, np.float32), info={"row": {"id": "nine"}})

    return [[one(sample) for sample in group] for group in groups(0)]


def steep(spec, now):
    """The score function, with a slope of 0 / 0 at the marked token."""
    return now.logp_BT * now.adv_BT + jnp.sqrt(jnp.where(now.sampler_BT == MARK, (0 * now.gap_BT) ** 2, 1.0)), None


def not_finite(model: str, layout: str) -> list[str]:
    """What is said of a log-probability of a sampler, and of a gradient, that are not finite."""
    config = replaced(
        grpo.Config(model, data="", reward=""), groups=4, group_size=4, length=32, rows=4, optim=PLAIN,
        mesh=mesh.Layout(**json.loads(layout)), objective=losses.GRPO(advantage={"std": "none"}, surrogate=steep),
    )  # fmt: skip
    learning, tokens = grpo.build_trainer(config), tokenizer.load(model)
    work: dict = {
        "update": functools.partial(trainer.train_packed, learning),
        "again": lambda: setattr(learning, "traced", False),
    }
    if jax.process_index() > 0:
        lockstep.worker_loop(work)
        return []
    with lockstep.leader(work) as run_on_all:
        said = []
        for logp in (-np.inf, MARK):
            origin, samples = trainer.train_on_batch(
                learning, marked(logp), functools.partial(run_on_all, "update")
            )["not_finite"]  # fmt: skip
            said.append(origin.said(samples, tokens))
            run_on_all("again")
    return said


def filled(model: str, layout: str):
    """A training state of numbers that are the same wherever they are drawn."""
    on = mesh.make(mesh.Layout(**json.loads(layout)))
    config = hf.read_config(model)
    table = models.table(config)
    optimizer = optim.make_optimizer(optim.Optimizer(), table)
    shardings = rules.of_state(optimizer, table, on)
    shapes = jax.eval_shape(lambda: step.init(param.init(jax.random.key(0), table), optimizer))

    def draw():
        leaves, tree = jax.tree.flatten(shapes)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        fill = lambda key, x: jax.random.uniform(key, x.shape, minval=-9, maxval=9).astype(x.dtype)
        return jax.tree.unflatten(tree, [fill(key, x) for key, x in zip(keys, leaves, strict=True)])

    return jax.jit(draw, out_shardings=shardings)()


def save_state(model: str, layout: str, path: str) -> None:
    with orbax.open_store(path) as store:
        store.save(7, filled(model, layout), {"next": 3})


def restore_state(model: str, layout: str, path: str) -> dict:
    """How many arrays came back, and how many of them as they were, to the bit, on this process's devices."""
    whole = filled(model, layout)
    like = jax.tree.map(lambda x: jax.jit(jnp.zeros_like, out_shardings=x.sharding)(x), whole)
    with orbax.open_store(path) as store:
        back, cursor = store.restore(like)
    assert cursor == {"next": 3} and store.latest == 7
    if jax.process_index() == 0:  # alone
        assert orbax.newest(Path(path)) == (7, cursor)
    processes.anyone(False)
    bits = lambda x: [np.asarray(one.data).tobytes() for one in x.addressable_shards]
    pairs = list(zip(*map(jax.tree.leaves, (back, whole)), strict=True))
    return {"arrays": len(pairs), "equal": sum(bits(a) == bits(b) for a, b in pairs)}


def load_and_export(model: str, layout: str, out: str) -> dict:
    """What memory this process takes at most, beyond what it had, to load its part of a checkpoint and to export it."""
    on = mesh.make(mesh.Layout(**json.loads(layout)))
    jax.block_until_ready(batches.host(jax.jit(lambda: jnp.zeros(8), out_shardings=jax.NamedSharding(on, jax.P()))()))
    (config, params), loading = growth(lambda: hf.load(model, mesh=on))
    held = sum(one.data.nbytes for x in jax.tree.leaves(params) for one in x.addressable_shards)
    _, exporting = growth(lambda: hf.save(out, config, params))
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    return {"loading": loading, "exporting": exporting, "held": held, "whole": whole}


def find_others(folder: str) -> dict[str, str]:
    """What loading says of models that are others in process 1, with other settings or with other weights."""
    mine = Path(folder) / str(jax.process_index())
    settings, weights = str(mine / "settings"), str(mine / "weights")
    on, tokens = mesh.make(mesh.Layout(fsdp=2)), tokenizer.load(weights)
    trained = replaced(
        grpo.Config(f"{folder}/0/weights", data="", reward=""), objective=losses.PPO(), length=32, rows=4,
        mesh=mesh.Layout(fsdp=2), critic=trainer.CriticOptions(model=weights),
    )  # fmt: skip
    scored = preference.Config(settings, data="")
    ways = {
        "settings": lambda: common.open_model(settings, "checkpoint", 0, on),
        "settings of new weights": lambda: common.open_model(settings, "random", 0, on),
        "weights": lambda: common.open_model(weights, "checkpoint", 0, on),
        "weights of a teacher": lambda: common.open_teacher(weights, models.Run(), on),
        "weights of a critic": lambda: grpo.build_trainer(trained),
        "settings of a scorer": lambda: score_head.open_model(scored, score_head.SCALAR, tokens, on),
    }
    return {what: _refusal(way) for what, way in ways.items()}


def _refusal(check) -> str:
    """The error of a check; "" if it passes."""
    try:
        check()
    except ValueError as error:
        return str(error)
    return ""


def open_apart(folder: str) -> str:
    """What is said if each process has a folder of its own; "" if it is the same one."""
    try:
        with orbax.open_store(Path(folder) / str(jax.process_index())):
            return ""
    except ValueError as error:
        with orbax.open_store(Path(folder) / "shared"):
            return str(error)


class Mute(ValueError):
    def __str__(self):
        raise RuntimeError("no text")


def leave(how: str) -> None:
    """Process 1 leaves by `sys.exit`, with nothing when all is done or with a text while process 0 waits for it, or by
    an error of areax's own, or by one whose text cannot be had."""
    if jax.process_index() == 1 and how == "error":
        answers.ids("enough of this", 0)
    if jax.process_index() == 1 and how == "nonsense":
        raise Mute("\udc80")
    if jax.process_index() == 1:
        sys.exit({"nothing": None, "text": "enough of this"}[how])
    if how != "nothing":
        processes.anyone(False)


def fail(folder: str) -> None:
    """Process 1 fails at what both do; each writes into `folder` before it leaves."""
    with processes.failing_together(lambda: (Path(folder) / f"{jax.process_index()}.saved").touch()):
        if jax.process_index() == 1:
            raise OSError("no such row")


def disagree(folder: str) -> dict[str, str]:
    """What the consistency checks say about values that process 1 may have otherwise; "" if nothing."""
    other = jax.process_index() == 1
    on = mesh.make(mesh.Layout(dp=4))
    spec = lambda *axes: jax.NamedSharding(on, jax.P(*axes))

    def array(sharding, wrong):
        """Of eight numbers; the wrong device has others in its part."""
        part = sharding.shard_shape((8,))
        own = [jax.device_put(np.arange(*part) + 9 * (d == wrong), d) for d in jax.local_devices()]
        return jax.make_array_from_single_device_arrays((8,), sharding, own)

    rows = [{"prompt": f"{i}+1", "answer": "x" * 300} for i in range(50)]
    changed = [*rows[:7], {"prompt": "7+1", "answer": "x" * 200 + "y" + "x" * 99}, *rows[8:]]
    numbers, last = np.arange(4000), jax.devices()[-1]
    pair = {"a": array(spec(), None), "b": array(spec("dp"), None)}
    checks = {
        "nothing": lambda: agreement.same("values", rows=rows, numbers=numbers, optim=GENTLE, surrogate=lambda x: x),
        "option": lambda: agreement.same("options", optim=GENTLE if other else PLAIN, steps=3),
        "row": lambda: agreement.same("rows", rows=changed if other else rows),
        "array": lambda: agreement.same("arrays", x={"numbers": numbers + other * (numbers == 3000)}),
        "type": lambda: agreement.same("types", loss=Other() if other else One()),
        "set": lambda: agreement.same("values", x={"words": {f"word {i}" for i in range(20)}}),
        "object array": lambda: agreement.same("arrays", x=np.array([f"{i}" for i in range(9)], object)),
        "picture": lambda: agreement.same("pictures", x=PIL.Image.new("L", (4, 4))),
        "other picture": lambda: agreement.same("pictures", x=PIL.Image.new("L", (4, 4), int(other))),
        "jax array": lambda: agreement.same("arrays", x=jnp.zeros(5000).at[2500].set(int(other))),
        "order": lambda: agreement.same("fields", **({"a": 1, "b": 2} if other else {"b": 2, "a": 1})),
        "absent": lambda: agreement.same("fields", **({"a": 1} if other else {"a": 1, "b": 2})),
        "equal replicas": lambda: agreement.replicas("arrays", pair),
        "one replica": lambda: agreement.replicas("arrays", {**pair, "c": [array(spec(), last)]}),
        "no replicas": lambda: agreement.replicas("arrays", {"b": array(spec("dp"), last)}),
        "state": lambda: store.save(1, {"c": array(spec(), last)}),
    }

    with orbax.open_store(folder) as store:
        return {name: _refusal(check) for name, check in checks.items()}


@dataclasses.dataclass(frozen=True)
class One:
    x: int = 1


@dataclasses.dataclass(frozen=True)
class Other:
    x: int = 1


def growth(work):
    """What `work` returns, and by how many bytes resident memory exceeded meanwhile what it was before."""
    Path("/proc/self/clear_refs").write_text("5")  # peak := now
    before = _peak()
    return work(), _peak() - before


def _peak() -> int:
    words = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(words.split()[1]) * 1024


if __name__ == "__main__":
    common.keep_memory()
    jax.config.update("jax_default_matmul_precision", "highest")
    with processes.job() as index:
        result = globals()[sys.argv[1]](*sys.argv[2:])
    print(f"\nRESULT {json.dumps(result)}")
