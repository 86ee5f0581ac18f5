"""The engine of a server and what its routes share: the bridge to it, the tokenizer, and the weights' origin."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .... import models
from ....adapters import hf
from ....models import wrappers
from ...chat import fields
from ...chat.api import logprobs
from ..checkpoint import CONFIG_BYTES, check_file_size, read_weights, readable
from ..request import Progress, Sampling
from . import request_parsing
from .async_bridge import Bridge


class Service:
    """The engine and the state of the server.

    Attributes:
      engine, bridge: process the requests.
      tokenizer: None = the model folder has none, and prompts are token ids.
      path: folder of the weights in use; `tokenizer_path`: the folder served initially.
      checksums: of the weights in use, from `checkpoint.read_weights`.
      dtype: of the weights in the engine.
      processor: of images, `adapters.data.images.Processor`; None = the model reads text alone.
      read: reads and stages a folder of weights, as `read_here`; replaced where other processes read, too (`hosts`).
    """

    def __init__(self, engine, tokenizer: Any, path: str, checksums: dict[str, str], dtype: str, processor: Any = None):
        self.processor = processor
        self.engine, self.tokenizer, self.checksums, self.dtype = engine, tokenizer, checksums, dtype
        self.path = self.tokenizer_path = path
        self.read, self.started = self.read_here, time.time()
        self.bridge: Bridge  # made on the event loop, when the server starts
        self.piece = functools.partial(logprobs.piece, tokenizer)

    @property
    def sees(self) -> bool:
        """Whether the model reads images."""
        return self.processor is not None

    def open(self) -> None:
        """Must be called on the event loop before the first request."""
        self.bridge = Bridge(self.engine)

    async def compile(self, chosen: Sequence[Sampling]) -> None:
        """Compiles grammars, in a thread; raises as `Grammars.compile`, or Refused if there is no tokenizer."""
        grammars = self.engine.grammars
        for grammar in {one.grammar for one in chosen if one.grammar}:
            if grammars is None:
                raise fields.Refused(grammar.field, "a grammar needs a tokenizer, but the model folder has none")
            if not grammars.known(grammar):
                await asyncio.to_thread(grammars.compile, grammar)

    def answer(self, progress: Progress, ask: request_parsing.Ask, i: int, start: float) -> dict:
        """The `/generate` answer for request i of a body, finished or in progress."""
        meta: dict[str, Any] = {
            "id": progress.rid,
            "finish_reason": progress.finish,
            "prompt_tokens": progress.prompt_tokens,
            "weight_version": progress.versions[-1][0] if progress.versions else self.engine.version,
            "num_retractions": progress.retractions,
            "lora_path": ask.requests[i].adapter or None,
            "constrained": ask.requests[i].sampling.constrained,
        }
        if ask.logprobs[i]:
            request = ask.requests[i]
            named = lambda logp, id: [logp, id, self.piece(id) if ask.texts else None]
            tops = lambda rows: [row if row is None else [named(*pair) for pair in row] for row in rows]
            if request.input_logprobs_from is None:
                meta["input_token_logprobs"] = []
            else:  # the contract's first entry never has a score
                inputs = request.prompt[request.input_logprobs_from :]
                scores = [None, *progress.input_logp[1:]]
                meta["input_token_logprobs"] = [named(logp, id) for logp, id in zip(scores, inputs, strict=False)]
            meta["output_token_logprobs"] = [
                named(logp, id) for logp, id in zip(progress.logp, progress.tokens, strict=True)
            ]
            meta["output_token_logprobs_length"] = len(progress.tokens)
            if request.top_logprobs:
                meta["input_top_logprobs"] = tops([None, *progress.input_top[1:]][: len(meta["input_token_logprobs"])])
                meta["output_top_logprobs"] = tops(progress.top)
        meta["completion_tokens"] = len(progress.tokens)
        meta["cached_tokens"] = progress.cached_tokens
        if ask.requests[i].routed_experts and progress.finish:  # i32[tokens but the last, layers, top_k]
            routed = np.array(progress.routed, np.int32)
            meta["routed_experts"] = base64.b64encode(routed.tobytes()).decode()
        if ask.requests[i].sampling_mask:
            masks = progress.masks
            meta["output_token_sampling_mask"] = [ids for _, ids in masks]
            meta["output_token_sampling_logprobs"] = [logp for logp, _ in masks]
            meta["output_token_sampling_mask_length"] = len(masks)
        spans = progress.versions or [(meta["weight_version"], 0, 0)]
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
        if progress.finish:
            meta["e2e_latency"] = time.perf_counter() - start
        return {"text": progress.decoded or "", "output_ids": progress.tokens, "meta_info": meta}

    def read_here(self, path: str) -> tuple[Any, dict[str, str]]:
        """Stages the weights of a checkpoint folder of the same model; returns them, and the checksums of its tensors.

        Raises:
          ValueError: as `read_weights`, or it is another model; the memory for weights is released.
        """

        def stage(config, params):
            self._same_model(config, path)
            self.engine.check_memory()
            if self.engine.draft_from == "mtp" and (predictor := hf.mapped_mtp(path, config, self.dtype)):
                params = {**params, "mtp": predictor}
            return self.engine.stage(params)

        with readable(path):
            self._check_config(path)
            _, weights, checksums = read_weights(path, self.dtype, stage, sees=self.sees)
        return weights, checksums

    def _check_config(self, path: str) -> None:
        """Refuses another model by its config.json, before anything of it is built, which could be of any size."""
        file = Path(path) / "config.json"
        if file.is_file():
            check_file_size(file, CONFIG_BYTES)
            layers = wrappers.text(hf.read_json(file)).get("num_hidden_layers")
            if layers != self.engine.config.layers:
                problem = f"num_hidden_layers {fields.shown(layers)} instead of {self.engine.config.layers}"
                raise ValueError(f"{path}: must contain the model that is served, but has {problem}")
        config = models.with_vision(hf.read_config(path)) if self.sees else hf.read_config(path)
        self._same_model(config, path, but=("source", "rest", "prefix", "score_head"))

    def _same_model(self, config, path: str, but: Sequence[str] = ("source", "rest")) -> None:
        ours, theirs = map(_compared, (self.engine.config, hf.with_ends(config, self.tokenizer)))
        if other := [name for name in ours if name not in but and ours[name] != theirs.get(name)]:
            shown = ", ".join(f"{name} {fields.shown(theirs.get(name))} instead of {ours[name]!r}" for name in other)
            raise ValueError(f"{path}: must contain the model that is served, but has {shown}")


def _compared(config) -> dict[str, Any]:
    made = dataclasses.asdict(config)
    if config.vision:
        del made["vision"]["trained"]  # a trainer's concern
    return made
