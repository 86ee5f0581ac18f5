"""Linear recurrences over packed rows whose state is a matrix per head, chunk by chunk: what the gated delta rule and
Mamba 2 share.

Within a chunk of C tokens all pairs are computed at once, for a block of chunks together; a scan carries the state
S [K, V] from chunk to chunk. With c_i the sum of the log decays g from the chunk's start to token i, itself included,
and d_ij that of the tokens after j up to i:

    W = U - Y S
    out_i = e^(c_i) q_i S + sum over j <= i of e^(d_ij) (q_i . k_j) W_j
    S' = e^(c_C) S + sum over j of e^(d_Cj) k_j^T W_j

Decays over the start of a sequence are 0, by masks: a large negative g there would spoil the sums. In shapes, L blocks
have M chunks each, X in all, and G keys serve R heads each.

Over tries (`core.trie`) a chunk has tokens of one node only, and begins with the state after the chunk of the token
before its first one, which each of the branches there reads. The scan is in the order of places, so that parents come
before their children; the backward pass goes the other way, and adds the gradients of branches up. It is as long as the
row: chunks of the same depth, which do not need each other, run one after the other.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ...core import hardware

STATES = "states"  # checkpoint name of the states at the starts of chunks, for rematerialisation policies
# Tokens per chunk and, of all rows together, per block. A block's arrays should stay in a core's cache; elsewhere, many
# matmuls at once keep a device busy.
CPU, ELSEWHERE = (32, 128), (64, 4096)


class Chunks(NamedTuple):
    """The terms of the recurrence, in fp32 or wider.

    Attributes:
      q_MBGRCK, k_MBGRCK: queries and keys; R may be 1.
      pair_MBGRCC: e^(d_ij) (q_i . k_j), 0 for j > i.
      start_MBGRC: e^(c_i).
      end_MBGRC: e^(d_Cj).
      whole_MBGR: e^(c_C).
      u_MBGRCV, y_MBGRCK: U and Y; None = no Y.
    """

    q_MBGRCK: Any
    k_MBGRCK: Any
    pair_MBGRCC: Any
    start_MBGRC: Any
    end_MBGRC: Any
    whole_MBGR: Any
    u_MBGRCV: Any
    y_MBGRCK: Any = None


def chunk_size() -> int:
    """Tokens per chunk on this platform."""
    return _sizes()[0]


def _sizes() -> tuple[int, int]:
    return CPU if hardware.platform() == "cpu" else ELSEWHERE


def run(prepare, inputs, segment_BT, chunk: int | None, state_BNKV=None, parent_BT=None):
    """Runs a recurrence from S = 0 at the start of every sequence.

    Memory is linear in T: the backward pass keeps the inputs and the state at each chunk's start, and prepares one
    block of chunks at a time again. Differentiable once, in reverse mode.

    Args:
      prepare: prepare(*inputs, segment_MBC, before_MB) returns Chunks; the inputs of a block are [M, B, G, R, C, ...],
        before_MB is the segment of the token before each chunk.
      inputs: arrays [B, T, N, ...], N = G or G R; the first has G.
      chunk: tokens per chunk; None = `chunk_size()`, 32 on a CPU, 64 elsewhere.
      state_BNKV: the states before rows of one sequence each, in place of 0; not differentiable.
      parent_BT: that of a `Trie` whose nodes start at multiples of the chunk; None = rows without tries. Places of
        padding must leave the state as it is. `segment_BT` is not read, nor `state_BNKV`.

    Returns:
      out_BTNV; state_BNKV after the last token of each row, None over tries.
    """
    (B, T), G = segment_BT.shape, inputs[0].shape[2]
    size, tokens = _sizes()
    C = min(chunk or size, T)
    blocks = -(-T // max(tokens // B, C))
    fill = -T % (blocks * C)

    def split(x_BT, mode):
        x_BT = jnp.pad(x_BT, ((0, 0), (0, fill), *((0, 0),) * (x_BT.ndim - 2)), mode=mode)
        return jnp.moveaxis(x_BT.reshape(B, blocks, -1, C, *x_BT.shape[2:]), 0, 2)

    def heads_first(x_BTN):
        x_BTGR = x_BTN.reshape(B, T, G, -1, *x_BTN.shape[3:])
        return jnp.moveaxis(split(x_BTGR, "constant"), 3, 5)

    segment_LMBC = split(segment_BT if parent_BT is None else jnp.zeros_like(segment_BT), "edge")
    last_LMB = segment_LMBC[..., -1]
    before_LMB = jnp.roll(last_LMB.reshape(-1, B), 1, 0).reshape(last_LMB.shape)  # the first of all meets S = 0
    given = tuple(map(heads_first, inputs)), (segment_LMBC, before_LMB)
    if parent_BT is not None:
        source_BX = jnp.pad(_sources(parent_BT, C), ((0, 0), (0, fill // C)))
        out_LMBGRCV, state_BGRKV = _run_tries(prepare, *given, source_BX.T.reshape(before_LMB.shape)), None
    elif state_BNKV is None:
        out_LMBGRCV, state_BGRKV = _run(prepare, *given)
    else:
        state_BGRKV = state_BNKV.reshape(B, G, -1, *state_BNKV.shape[2:])
        out_LMBGRCV, state_BGRKV = _forward(prepare, *given, state_BGRKV)[0]
    out_BLMCGRV = jnp.moveaxis(out_LMBGRCV, (2, 5), (0, 3))
    out_BTNV = out_BLMCGRV.reshape(B, T + fill, -1, out_LMBGRCV.shape[-1])[:, :T]
    return out_BTNV, None if state_BGRKV is None else state_BGRKV.reshape(B, -1, *state_BGRKV.shape[3:])


def time_steps(bounds, key, shape, dtype):
    """The initial bias of time steps: the inverse softplus of a log-uniform distribution between bounds."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, *map(math.log, bounds)))
    return dt + jnp.log(-jnp.expm1(-dt))


def decays(g_MBGRC, segment_MBC, before_MB):
    """(e^(d_ij), 0 for j > i, [M, B, G, R, C, C], e^(c_i) [M, B, G, R, C], e^(d_Cj) likewise, e^(c_C) [M, B, G, R]).

    Each d_ij is a sum of its own: differences of running sums cancel, and their error grows with the chunk and the
    gates. A matmul with zeros and ones makes the sums.
    """
    C = g_MBGRC.shape[-1]
    token, i, j = np.ogrid[:C, :C, :C]
    between_CX = ((j < token) & (token <= i)).reshape(C, C * C).astype(g_MBGRC.dtype)
    sum_MBGRX = jnp.tensordot(g_MBGRC, between_CX, 1, precision="highest")
    sum_MBGRCC = sum_MBGRX.reshape(*g_MBGRC.shape, C)
    sees_MBCC = (segment_MBC[..., None] == segment_MBC[..., None, :]) & np.tri(C, dtype=bool)[None, None]
    continues_MBC = segment_MBC == before_MB[..., None]
    pair_MBGRCC = jnp.where(sees_MBCC[:, :, None, None], jnp.exp(sum_MBGRCC), 0)
    start_MBGRC = jnp.where(continues_MBC[:, :, None, None], jnp.exp(sum_MBGRCC[..., 0] + g_MBGRC[..., :1]), 0)
    return pair_MBGRCC, start_MBGRC, pair_MBGRCC[..., -1, :], start_MBGRC[..., -1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(prepare, inputs, where):
    return _forward(prepare, inputs, where)[0]


def _forward(prepare, inputs, where, state=None):
    def block(state, given):
        chunks = prepare(*given)
        state, states = jax.lax.scan(lambda state, chunk: (_next(state, chunk), state), state, chunks)
        return state, (_out(states, chunks), states)

    given = *inputs, *where
    state = _zeros(prepare, given) if state is None else state
    last, (out, states) = jax.lax.scan(block, state, given)
    return (out, last), (inputs, where, checkpoint_name(states, STATES))


def _backward(prepare, kept, grads):
    def before(dnext, given):
        dread, chunk = given
        return dread + _to_start(dnext, chunk), dnext

    def block(dnext, given):
        inputs, where, starts, dout = given
        scan = lambda *given: jax.lax.scan(before, dnext, given, reverse=True)
        return _block_backward(prepare, inputs, where, starts, dout, scan)

    dout, dlast = grads
    _, dinputs = jax.lax.scan(block, dlast, (*kept, dout), reverse=True)
    return dinputs, None


_run.defvjp(_forward, _backward)


def _sources(parent_BT, C: int):
    """The index, in the states before all chunks and after each, of that which each chunk starts with, i32[B, X]."""
    first_BX = parent_BT[:, ::C]
    own_X = np.arange(0, parent_BT.shape[1], C, dtype=np.int32)
    return jnp.where(first_BX == own_X[None], 0, first_BX // C + 1)


# Loops over tries write first what the step before made and read then, so that XLA updates the states in place.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_tries(prepare, inputs, where, source_LMB):
    return _forward_tries(prepare, inputs, where, source_LMB)[0]


def _forward_tries(prepare, inputs, where, source_LMB):
    def next_chunk(carried, given):
        (states, last), (chunk, source_B, x) = carried, given
        states = states.at[x].set(last)
        start = _of_rows(states, source_B)
        return (states, _next(start, chunk)), start

    def block(carried, given):
        *given, source_MB, x_M = given
        chunks = prepare(*given)
        carried, starts = jax.lax.scan(next_chunk, carried, (chunks, source_MB, x_M))
        return carried, _out(starts, chunks)

    given, x_LM = (*inputs, *where), _numbers(source_LMB)
    first = _zeros(prepare, given)
    states = jnp.zeros((x_LM.size, *first.shape), first.dtype)
    (states, _), out = jax.lax.scan(block, (states, first), (*given, source_LMB, x_LM))
    return out, (inputs, where, source_LMB, checkpoint_name(states, STATES))


def _backward_tries(prepare, kept, dout):
    inputs, where, source_LMB, states = kept

    def chunk_before(carried, given):
        (dstarts, later), (dread, chunk, child_B, sibling_B, x) = carried, given
        dstarts = dstarts.at[x + 1].set(later)
        dnext = _of_rows(dstarts, child_B)
        return (dstarts, _of_rows(dstarts, sibling_B) + dread + _to_start(dnext, chunk)), dnext

    def block(carried, given):
        inputs, where, source_MB, dout, *tree = given
        starts = jax.vmap(_of_rows, (None, 0))(states, source_MB)
        scan = lambda *given: jax.lax.scan(chunk_before, carried, (*given, *tree), reverse=True)
        return _block_backward(prepare, inputs, where, starts, dout, scan)

    given = inputs, where, source_LMB, dout, *_relatives(source_LMB), _numbers(source_LMB)
    none = jnp.zeros_like(states[0])
    dstarts = jnp.zeros((1 + len(states), *none.shape), none.dtype)
    _, dinputs = jax.lax.scan(block, (dstarts, none), given, reverse=True)
    return dinputs, None, None


_run_tries.defvjp(_forward_tries, _backward_tries)


def _numbers(source_LMB):
    """The number of each chunk, i32[L, M]."""
    return np.arange(source_LMB[..., 0].size, dtype=np.int32).reshape(source_LMB.shape[:2])


def _relatives(source_LMB):
    """The first child of each chunk and its next sibling, i32[L, M, B]; X = none.

    With the gradients of a chunk's first state go those of its later siblings, so that one read gets the sum over all
    children, and nothing has to be scattered.
    """
    source_XB = source_LMB.reshape(-1, source_LMB.shape[-1])
    X = len(source_XB)
    own_X11, other_1X1, _ = np.ogrid[:X, :X, :1]
    first = lambda of_XXB: jnp.min(jnp.where(of_XXB, other_1X1, X), 1).reshape(source_LMB.shape)
    return first(source_XB[None] == 1 + own_X11), first((source_XB[None] == source_XB[:, None]) & (own_X11 < other_1X1))


def _of_rows(states, source_B):
    """Each row's state of this index."""
    return jax.vmap(lambda states_X, source: states_X[source], (1, 0))(states, source_B)


def _zeros(prepare, given):
    """The states before the first tokens."""
    one = jax.eval_shape(prepare, *(x[0] for x in given))
    sizes = one.k_MBGRCK.shape[-1], one.u_MBGRCV.shape[-1]
    return jnp.zeros((*one.u_MBGRCV.shape[1:4], *sizes), one.u_MBGRCV.dtype)


def _to_start(dnext, chunk: Chunks):
    """The gradient of a chunk's first state through its last one."""
    return jax.vjp(lambda state: _next(state, chunk), jnp.zeros_like(dnext))[1](dnext)[0]


def _block_backward(prepare, inputs, where, starts, dout, scan):
    """(what the scan carries on, the gradients of the inputs) of a block of chunks with these first states.

    Args:
      scan: scan(dread, chunks) -> (carried, the gradients of the chunks' last states), where dread are those of their
        first states through their outputs.
    """
    chunks, to_inputs = jax.vjp(lambda *inputs: prepare(*inputs, *where), *inputs)
    [dread] = jax.vjp(lambda starts: _out(starts, chunks), starts)[1](dout)
    carried, dnexts = scan(dread, chunks)
    [dchunks] = jax.vjp(lambda chunks: (_out(starts, chunks), _next(starts, chunks)), chunks)[1]((dout, dnexts))
    return carried, to_inputs(dchunks)


def _written(state, chunk: Chunks):
    """W."""
    return chunk.u_MBGRCV if chunk.y_MBGRCK is None else chunk.u_MBGRCV - chunk.y_MBGRCK @ state


def _out(state, chunk: Chunks):
    return chunk.start_MBGRC[..., None] * (chunk.q_MBGRCK @ state) + chunk.pair_MBGRCC @ _written(state, chunk)


def _next(state, chunk: Chunks):
    """S'."""
    kept = chunk.end_MBGRC[..., None] * _written(state, chunk)
    return chunk.whole_MBGR[..., None, None] * state + chunk.k_MBGRCK.mT @ kept
