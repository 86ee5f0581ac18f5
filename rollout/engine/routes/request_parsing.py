"""Parses bodies of generation requests, in SGLang's or OpenAI's format, to requests of the engine.

A field that is unknown, or that the engine does not support, is refused, unless its value has no effect. Fields that
cannot change the result (priorities, logging, routing) are ignored.
"""

from __future__ import annotations

import collections
import functools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...chat import fields
from ...chat.api import openai
from ...chat.fields import Refusal, rule, shown
from ...types import Image
from ..pictures import Pictures, Placement
from ..request import BIASES, Grammar, Request, Sampling
from . import image_data

GRAMMARS = ("json_schema", "regex", "ebnf", "choice")  # fields of which at most one is given
SAMPLING = fields.table(
    [
        "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids",
        "ignore_eos", "sampling_seed", "n", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
        *GRAMMARS, "stream_interval",
    ],
    ["spaces_between_special_tokens"],
    {
        "structural_tag": Refusal("give a json_schema, a regex or an ebnf", ("",)),
        "stop_regex": Refusal("give the strings to stop at as stop", ("", [])),
        "beam_width": Refusal("sequences are sampled, not searched", (1,)),
        "no_stop_trim": Refusal("a stop string is never part of the text", (False,)),
        "skip_special_tokens": Refusal("special tokens are never part of the text", (True,)),
        "custom_params": Refusal(but=({},)),
        "watermark": Refusal(but=(False,)),
    },
)  # fmt: skip
NOTHING: tuple = (False, "", [], {}, 0)
GENERATE = fields.table(
    [
        "text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
        "return_text_in_logprobs", "stream", "rid", "lora_path", "return_routed_experts", "image_data",
        "return_sampling_mask",
    ],
    [
        "extra_key", "cache_salt", "priority", "log_metrics", "no_logs", "session_id", "conversation_id",
        "routing_key", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "bootstrap_host",
        "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "external_trace_header", "received_time",
        "custom_labels", "modalities",
    ],
    {
        name: Refusal(but=NOTHING)
        for name in (
            "input_embeds", "video_data", "audio_data", "session_params", "watermark",
            "custom_logit_processor", "positional_embed_overrides", "token_ids_logprob",
            "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_hidden_states",
            "return_indexer_topk", "return_entropy", "return_prompt_token_ids", "max_thinking_tokens",
            "multi_item_delimiter_indices", "token_indices_to_pool", "lora_id", "background", "return_bytes",
            "require_reasoning", "routed_experts_start_len",
        )
    },
)  # fmt: skip
SEEDS = range(-(2**63), 2**63)
LOGPROBS = 2**19  # most log-probabilities in an answer for several samples
LONGEST_RID = 256  # characters


@dataclass(frozen=True)
class Ask:
    """A parsed body.

    Attributes:
      requests: all samples of the first prompt, then of the second, and so on.
      n: samples per prompt.
      single: the answer is one object, not a list.
      stream: stream the answers.
      logprobs: for each request, whether the answer has log-probabilities.
      texts: log-probabilities include the token's text.
      images: of each prompt, with their patches, kept until the engine has the requests.
      every: new tokens of an answer after which it is streamed again.
    """

    requests: tuple[Request, ...]
    n: int
    single: bool
    stream: bool
    logprobs: tuple[bool, ...]
    texts: bool
    images: Sequence[Placement | None] = ()
    every: int = 1


def generate(body: Any, tokenizer: Any, context: int, pictures: Pictures | None = None) -> Ask:
    """Parses the body of `/generate`.

    Args:
      tokenizer: for `text` prompts; None = token ids only.
      context: longest sequence, prompt and generated tokens.
      pictures: of the engine; None = it reads text alone.

    Raises:
      ValueError: a field that is missing, malformed or cannot be honoured.
    """
    if not isinstance(body, Mapping):
        raise ValueError(f"/generate: the body must be a JSON object, got {shown(body)}")
    fields.known(body, GENERATE)
    prompts, single = _prompts(body, tokenizer, context)
    P = len(prompts)
    seen = image_data.read(body.get("image_data"), P, single, pictures)
    if pictures:
        prompts = [pictures.expanded(prompt, images) for prompt, images in zip(prompts, seen, strict=True)]
    params = _each(body, "sampling_params", P, Mapping, {})
    chosen = [sampling(p, context - len(prompt)) for p, prompt in zip(params, prompts, strict=True)]
    n = chosen[0][1] if chosen else 1
    rule({n} >= {m for _, m in chosen}, "n", "must be the same for all prompts of a body", [m for _, m in chosen])
    check_count(P, n)
    wanted = _each(body, "return_logprob", P, bool, False)
    starts = _each(body, "logprob_start_len", P, int, -1)
    tops = _each(body, "top_logprobs_num", P, int, 0)
    routed = _each(body, "return_routed_experts", P, bool, False)
    masks = _each(body, "return_sampling_mask", P, bool, False)
    adapters = _each(body, "lora_path", P, str | None, None)
    requests: list[Request] = []
    names = rids(body.get("rid"), P, single, n)
    for prompt, (one, _), logprob, start, top, experts, mask, adapter, rid, images in zip(
        prompts, chosen, wanted, starts, tops, routed, masks, adapters, names, seen, strict=True
    ):
        if start > len(prompt):
            raise ValueError(f"logprob_start_len: must be at most the prompt's {len(prompt)} tokens, got {start}")
        inputs = start if logprob and 0 <= start < len(prompt) else None
        tops_of = max(top, 0) if logprob else 0
        requests += samples(prompt, one, rid, inputs, tops_of, experts, adapter or "", images, mask)
    logprobs = tuple(logprob for logprob in wanted for _ in range(n))
    check_size(requests, logprobs)
    return Ask(
        requests=tuple(requests),
        n=n,
        single=single and n == 1,
        stream=fields.boolean(body, "stream"),
        logprobs=logprobs,
        texts=fields.boolean(body, "return_text_in_logprobs"),
        images=[image_data.placed(pictures, *each, context) for each in zip(prompts, seen, strict=True)],
        every=min((_integer(p, "stream_interval", 1) for p in params), default=1),
    )


def check_count(prompts: int, n: int) -> None:
    """Raises Refused if a body has too many samples."""
    samples, most = prompts * n, fields.MOST_PROMPTS
    rule(samples <= most, "n", f"must give at most {most} samples, prompts times n", samples)


def check_size(requests: Sequence[Request], logprobs: Sequence[bool]) -> None:
    """Raises Refused if the answer for several samples would have too many log-probabilities."""
    if len(requests) == 1:
        return
    size = 0
    for request in (request for request, wanted in zip(requests, logprobs, strict=True) if wanted):
        start = request.input_logprobs_from
        inputs = 0 if start is None else len(request.prompt) - start
        size += (inputs + request.sampling.max_new_tokens) * (1 + request.top_logprobs)
    rule(size <= LOGPROBS, "n", f"must give at most {LOGPROBS} log-probabilities, those of top_logprobs included", size)


def sampling(given: Mapping[str, Any], room: int) -> tuple[Sampling, int]:
    """Parses `sampling_params` to (sampling parameters, samples per prompt); null stands for the default.

    Args:
      room: tokens that fit after the prompt, the budget if max_new_tokens is null.

    Raises:
      ValueError: a field that is unknown, out of range or cannot be honoured.
    """
    fields.known(given, SAMPLING)
    given = {"max_new_tokens": 128, **given}
    most = _integer(given, "max_new_tokens", max(0, room))
    least = _integer(given, "min_new_tokens", 0)
    n = _integer(given, "n", 1)
    seed = _integer(given, "sampling_seed", None)
    top_k = _integer(given, "top_k", -1)
    temperature = _number(given, "temperature", 1.0)
    top_p = _number(given, "top_p", 1.0)
    min_p = _number(given, "min_p", 0.0)
    rule(temperature >= 0, "temperature", "must be a non-negative finite number", temperature)
    rule(0 < top_p <= 1, "top_p", "must be in (0, 1]", top_p)
    rule(0 <= min_p <= 1, "min_p", "must be in [0, 1]", min_p)
    rule(top_k == -1 or top_k >= 1, "top_k", "must be -1 (off) or at least 1", top_k)
    rule(most >= 0, "max_new_tokens", "must be at least 0", most)
    rule(0 <= least <= most, "min_new_tokens", f"must be from 0 to max_new_tokens, which is {most}", least)
    rule(1 <= n <= fields.MOST_PROMPTS, "n", f"must be from 1 to {fields.MOST_PROMPTS}", n)
    rule((every := _integer(given, "stream_interval", 1)) >= 1, "stream_interval", "must be at least 1", every)
    rule(seed is None or seed in SEEDS, "sampling_seed", "must be in [-2**63, 2**63)", seed)
    stop = fields.stops(given, "stop")
    stop_ids = given.get("stop_token_ids")
    stop_ids = () if stop_ids is None else stop_ids
    rule(_all(stop_ids, int), "stop_token_ids", "must be a list of token ids", stop_ids)
    frequency, presence = (_number(given, name, 0.0) for name in ("frequency_penalty", "presence_penalty"))
    repetition = _number(given, "repetition_penalty", 1.0)
    rule(-2 <= frequency <= 2, "frequency_penalty", "must be in [-2, 2]", frequency)
    rule(-2 <= presence <= 2, "presence_penalty", "must be in [-2, 2]", presence)
    rule(0 < repetition <= 2, "repetition_penalty", "must be in (0, 2]", repetition)
    constraint = grammar(given)
    ignore_eos = fields.boolean(given, "ignore_eos")
    rule(not (constraint and ignore_eos), "ignore_eos", "must be false with a grammar, which ends the text", True)
    chosen = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_new_tokens=most,
        min_new_tokens=least,
        stop=stop,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=ignore_eos,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=_biases(given),
        grammar=constraint,
        seed=None if seed is None else seed % 2**64,
    )
    return chosen, n


def grammar(given: Mapping[str, Any]) -> Grammar | None:
    """The grammar that `sampling_params` name; empty values name none."""
    named = [name for name in GRAMMARS if given.get(name)]
    rule(len(named) <= 1, named[-1] if named else "", f"must be the only one of {', '.join(GRAMMARS)}", named)
    if not named:
        return None
    (name,) = named
    value = given[name]
    if name == "choice":
        rule(_all(value, str) and all(value), name, "must be a list of strings, none empty", value)
        return Grammar(name, json.dumps(value), name)
    rule(isinstance(value, str), name, "must be a string", value)
    return Grammar(name, value, name)


def _biases(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    biases = fields.mapping(given, "logit_bias")
    rule(len(biases) <= BIASES, "logit_bias", f"must have at most {BIASES} tokens", len(biases))
    right = all(id.isdecimal() and id.isascii() and len(id) < 10 for id in biases)
    rule(right, "logit_bias", "must map token ids to biases", biases)
    made = tuple((int(id), fields.number(biases, id)) for id in biases)
    rule(all(-100 <= bias <= 100 for _, bias in made), "logit_bias", "its values must be in [-100, 100]", biases)
    rule(len(dict(made)) == len(made), "logit_bias", "must not name a token twice", biases)
    return made


def samples(
    prompt: tuple[int, ...],
    chosen: Sampling,
    rid: Sequence[str],
    inputs: int | None = None,
    top: int = 0,
    experts: bool = False,
    adapter: str = "",
    images: tuple[Image, ...] = (),
    mask: bool = False,
) -> list[Request]:
    """Makes one request per name in `rid`, all for one prompt. Sample k of a seeded request is drawn with seed + k: it
    differs from the others, and equals a separate request with that seed."""
    if not prompt:
        raise ValueError("the prompt must have at least one token, got none")
    more = inputs, top, experts, adapter, images, mask
    if chosen.seed is None or len(rid) == 1:
        return [Request(name, prompt, chosen, *more) for name in rid]
    each = [replace(chosen, seed=(chosen.seed + k) % 2**64) for k in range(len(rid))]
    return [Request(name, prompt, one, *more) for name, one in zip(rid, each, strict=True)]


def rids(given: Any, P: int, single: bool, n: int) -> list[list[str]]:
    """Names of the `n` samples of each of P prompts: the caller's, numbered if one stands for several."""
    if given is None:
        return [[f"{random.getrandbits(128):032x}" for _ in range(n)] for _ in range(P)]
    if isinstance(given, list):
        rule(_all(given, str) and len(given) == P, "rid", f"must be one string, or one for each of {P} prompts", given)
        rule(
            all(0 < len(rid) <= LONGEST_RID for rid in given), "rid", f"must have 1 to {LONGEST_RID} characters", given
        )
        twice = sorted(rid for rid, count in collections.Counter(given).items() if count > 1)
        rule(not twice, "rid", "must differ within a body", twice)
        names = given
    else:
        right = isinstance(given, str) and 0 < len(given) <= LONGEST_RID
        rule(right, "rid", f"must be a string of 1 to {LONGEST_RID} characters", given)
        names = [given] if single else [f"{given}_{i}" for i in range(P)]
    return [[name] if n == 1 else [f"{name}_{k}" for k in range(n)] for name in names]


def ids(given: Any, name: str) -> tuple[int, ...]:
    """Checks the type of a prompt of token ids; the engine checks that they are in the vocabulary."""
    rule(_all(given, int), name, "must be a list of token ids", given)
    return tuple(given)


def _prompts(body, tokenizer, context):
    """(token ids of each prompt, whether the body has a single prompt and not a list)."""
    given = body.get("input_ids")
    if given is not None:
        rule(isinstance(given, list), "input_ids", "must be a list of token ids, or of such lists", given)
        if given and isinstance(given[0], list):
            check_count(len(given), 1)
            return [ids(one, "input_ids") for one in given], False
        return [ids(given, "input_ids")], True
    text = body.get("text")
    if text is None:
        raise ValueError("/generate: give the prompt as text or as input_ids")
    rule(isinstance(text, str) or (_all(text, str) and text != []), "text", "must be a string or a list of them", text)
    words = [text] if isinstance(text, str) else text
    check_count(len(words), 1)
    for word in words:
        check_text(word, tokenizer, context, "text")
    return [tuple(openai.encode(tokenizer, word, "text")) for word in words], isinstance(text, str)


def check_text(text: str, tokenizer: Any, context: int, name: str) -> None:
    """Raises Refused if a text is too long for the context whatever its tokens, which take long to find."""
    if tokenizer is not None and len(text) > context:
        most = min(context * _longest_token(tokenizer), fields.LONGEST_TEXT)
        rule(len(text) <= most, name, f"must have at most {most} characters for {context} tokens", len(text))


@functools.lru_cache(1)
def _longest_token(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))


def _each(body, name, P, kind, default):
    """One value for each of P prompts, from a value for all or a list."""
    given = body.get(name)
    if given is None:
        return [default] * P
    values = given if isinstance(given, list) else [given]
    right = all(isinstance(v, kind) and (kind is not int or v is not True and v is not False) for v in values)
    rule(right, name, f"must be {KINDS[kind]}", given)
    if values is not given:
        return values * P
    rule(len(values) == P, name, f"must be one value, or one for each of {P} prompts", given)
    return values


KINDS = {bool: "true or false", int: "a whole number", Mapping: "an object", str | None: "a name"}


def _number(given, name, default):
    return default if given.get(name) is None else fields.number(given, name)


def _integer(given, name, default):
    return default if given.get(name) is None else fields.integer(given, name)


def _all(values, kind):
    return isinstance(values, list | tuple) and set(map(type, values)) <= {kind}
