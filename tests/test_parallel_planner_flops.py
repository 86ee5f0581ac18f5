"""FLOPs of every family's forward pass beside the products in its traced program."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families
from jax.extend import core as jaxprs

from areax import models
from areax.core import param
from areax.models import lora
from areax.models.attention.pattern import Pattern
from areax.models.layer import Recurrent
from areax.models.layers import recurrence
from areax.parallel import experts, mesh
from areax.parallel.planner import flops
from areax.parallel.planner.job import Job

T = 64  # one chunk of queries: all pairs are computed, masked or not


def counted(jaxpr, turns: int) -> int:
    """FLOPs of the products in a program, loops in full; `turns` of those over the blocks of experts, whose number
    depends on the tokens."""
    total = 0
    for equation in jaxpr.eqns:
        shapes = [x.aval.shape for x in equation.invars]
        match equation.primitive.name:
            case "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                out = math.prod(equation.outvars[0].aval.shape)
                total += 2 * out * math.prod(shapes[0][axis] for axis in contracted)
        times = {"scan": equation.params.get("length", 1), "while": turns}.get(equation.primitive.name, 1)
        inner = [counted(each, turns) for each in subprograms(equation)]
        total += times * (max(inner, default=0) if equation.primitive.name == "cond" else sum(inner))
    return total


def subprograms(equation):
    leaves = jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, jaxprs.ClosedJaxpr | jaxprs.Jaxpr))
    found = [x for x in leaves if isinstance(x, jaxprs.ClosedJaxpr | jaxprs.Jaxpr)]
    return [x.jaxpr if isinstance(x, jaxprs.ClosedJaxpr) else x for x in found]


def job(config, length=T, **rest):
    return Job(
        models.table(config), config.records, mesh.Layout(), 1, length, 1, 1, length,
        top_k=getattr(config, "top_k", 0), chunks=recurrence.CPU, **rest,
    )  # fmt: skip


def forward(config, spec=None) -> int:
    """FLOPs of a row's forward pass, by the program."""
    table = models.table(config)
    params, token_BT = param.abstract(table), jax.ShapeDtypeStruct((1, T), jnp.int32)
    if spec:
        params = lora.join(params, param.abstract(lora.table(table, spec)), spec)
    traced = jax.make_jaxpr(lambda *given: models.forward(*given, config=config))(params, token_BT)
    pairs = T * getattr(config, "top_k", 0)
    _, rows = experts.blocks(pairs, config.experts) if pairs else (0, 1)
    assert pairs % rows == 0
    return counted(traced.jaxpr, pairs // rows)


def test_every_family_has_a_tiny_config():
    assert set(tiny_families.FAMILIES) == set(models.FAMILIES)


@pytest.mark.sweep
@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_flops_of_a_forward_pass_are_those_of_the_program(family):
    """To the last product. The formula leaves out a small one, of the biases of GPT-OSS's experts."""
    config = tiny_families.config(family)
    made = job(config)
    attended = [sum(flops.attention(layer, T * T)) for layer in config.records if hasattr(layer, "heads")]
    recurrent = [sum(flops.recurrence(made, layer)) for layer in config.records if hasattr(layer, "state")]
    formula = T * (2 * flops.active(made) + sum(recurrent)) + sum(attended)
    mixtures = [stack for stack in made.stacks if "router" in stack for _ in stack["router"].layers]
    biases = sum(2 * T * config.experts * config.embed for stack in mixtures if "expert_down_bias" in stack)
    assert forward(config) == formula + biases


def test_adapters_add_their_own_products():
    """The frozen weights have no gradient: two products of each in the backward pass become one."""
    config, spec = tiny_families.config("qwen3"), lora.Lora(4)
    made = job(config, adapters=lora.table(models.table(config), spec), scores=1)
    found, plain = (flops.flops(each, pairs=lambda *_: T * T) for each in (made, job(config, scores=1)))
    assert found.scores == forward(config, spec)
    assert found.matmuls == 2 / 3 * plain.matmuls + 3 * (found.scores - plain.scores)


@pytest.mark.parametrize(
    "pattern", [Pattern(), Pattern(window=5), Pattern(chunk=7), Pattern(window=4, chunk=9), Pattern(window=99)], ids=str
)
@pytest.mark.parametrize("sequence", [1, 5, 30])
def test_pairs_are_counted_one_by_one(pattern, sequence):
    """Of packed sequences, with windows and chunks that end within them."""
    made = job(tiny_families.config("qwen3"), length=2 * sequence)
    layer = dataclasses.replace(made.records[0], pattern=pattern)
    index = np.arange(sequence)
    seen = (index[:, None] >= index) & (index >= np.asarray(pattern.first(jnp.asarray(index)))[:, None])
    assert flops.pairs(dataclasses.replace(made, sequence=sequence), layer) == 2 * seen.sum()


def test_a_recurrence_of_another_kind_is_refused_by_name():
    unknown = Recurrent((("k", (8, 3)), ("v", (8, 3)), ("other", (2, 4, 4))))
    with pytest.raises(ValueError, match="a recurrence must be one of delta, mamba, got other; add its FLOPs to"):
        flops.recurrence(job(tiny_families.config("qwen3")), unknown)


def test_recurrent_layers_are_linear_in_the_length_of_sequences():
    of = lambda length: flops.flops(job(tiny_families.config("qwen3_5_text"), length))
    short, long = of(128), of(512)
    assert long.recurrence == 4 * short.recurrence > 0 and long.attention > 15 * short.attention
