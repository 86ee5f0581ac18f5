"""vLLM's HTTP interface (0.32): generation by token ids, and weights from folders.

A server must be started with VLLM_SERVER_DEV_MODE=1 in its environment, `--enable-scale-out` and, to sample at another
temperature than 1, `--logprobs-mode processed_logprobs`; for adapters also with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ServerError
from . import answers
from .answers import A_TOKEN, ADAPTERS, BESIDES, EXPERTS, LONGEST, positive
from .concurrency import Report
from .endpoint import Endpoint
from .image_tokens import TokensPrompt
from .labels import per_token
from .types import Description, Part, Reported

LAYOUT = ("dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
PREFIX = "generate-tokens-"  # of the names of requests, in answers and aborts
PAUSES = {"retract": "abort", "abort": "abort", "in_place": "keep"}  # vLLM requeues nothing: the client continues
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


@dataclass(eq=False)
class VLLM(Endpoint):
    """The calls to one server; those of `sglang.SGLang`, of which it is another kind.

    Attributes:
      vocabulary, context: as there.
      mode: what its log-probabilities are (`--logprobs-mode`), once it has been described.
    """

    vocabulary: int = 0
    context: int = 0
    mode: str = ""

    async def describe(self, *, timeout_s: float) -> Description:
        """The server's own description; raises as `call`, ValueError if it was not started for training."""
        try:
            weights = await self.reported_weights(timeout_s=timeout_s)
            info = (await self.call("GET", "/server_info?config_format=json", timeout_s=timeout_s))["vllm_config"]
            parts = [part for part in info.values() if isinstance(part, dict)]
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{self.url}: vLLM must be started with VLLM_SERVER_DEV_MODE=1 in its environment ({error})"
            ) from error
        config = {name: value for part in parts for name, value in part.items()}
        self.context, self.mode = positive(config, "max_model_len"), str(config.get("logprobs_mode"))
        if not self.mode.endswith("_logprobs"):
            raise ValueError(f"{self.url}: vLLM needs --logprobs-mode processed_logprobs, got {self.mode}")
        ranks = await self.call("GET", "/get_world_size", timeout_s=timeout_s)
        asleep = config.get("enable_sleep_mode") and await self.call("GET", "/is_sleeping", timeout_s=timeout_s)
        return Description(
            weights=weights,
            seeded=False,  # what a seed gives depends on the batch, and begins anew in a request that goes on
            stages=False,
            ranks=positive(ranks, "world_size") or 1,
            layout=json.dumps([str(config.get(name)).removeprefix("torch.") for name in LAYOUT]),
            released=bool(asleep and asleep.get("is_sleeping")),
            capacity=positive(config, "kv_cache_size_tokens"),
            slots=positive(config, "max_num_seqs"),
            context=self.context,
        )

    async def health(self, *, timeout_s: float = 20.0) -> bool:
        try:
            await self.call("GET", "/health", timeout_s=timeout_s, reach_s=0.0)
        except ServerError:
            return False
        return True

    async def reported_load(self, *, timeout_s: float = 60.0) -> Report | None:
        """None: vLLM says it in Prometheus' format alone."""
        return None

    async def reported_weights(self, *, timeout_s: float = 60.0, reach_s: float | None = None) -> Reported:
        """The label that it reports for its weights; it does not say which folder they are from."""
        answer = await self.call("GET", "/weight_info", timeout_s=timeout_s, reach_s=reach_s)
        if not isinstance(label := answer.get("weight_version"), str):
            raise ServerError(f"{self.url}/weight_info: no weight_version in the answer")
        return Reported(label, "")

    async def pause(self, mode: str = "retract", *, timeout_s: float = 60.0, reach_s: float | None = None) -> None:
        """Stops generation: `abort` and `retract` return running requests, `in_place` freezes them."""
        path = f"/pause?mode={PAUSES[mode]}&clear_cache=true"
        await self.call("POST", path, {}, timeout_s=timeout_s, reach_s=reach_s)

    async def resume(self, *, timeout_s: float = 60.0) -> None:
        await self.call("POST", "/resume", {}, timeout_s=timeout_s, reach_s=self.reach_s)

    async def update_weights_from_disk(
        self, path: str, label: str, *, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        """Loads the checkpoint directory `path`, as the server sees it, and has it call these weights `label`. Its
        prefix cache was cleared by the pause, but for one that freezes requests."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self.call("POST", "/collective_rpc", body, timeout_s=timeout_s, reach_s=self.reach_s)
        body = {"new_version": label}
        await self.call(
            "POST", "/update_weight_version", body, timeout_s=timeout_s, reach_s=self.reach_s, must_succeed=True
        )

    async def release_memory(self, *, timeout_s: float = 120.0) -> None:
        """Drops weights and caches; a server without --enable-sleep-mode refuses."""
        await self.call("POST", "/sleep?level=2&mode=abort", {}, timeout_s=timeout_s, reach_s=self.reach_s)

    async def resume_memory(self, *, timeout_s: float = 120.0) -> None:
        await self.call("POST", "/wake_up", {}, timeout_s=timeout_s, reach_s=self.reach_s)

    async def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        await self.call("POST", "/reset_prefix_cache", {}, timeout_s=timeout_s)

    async def abort(self, rid: str = "", *, timeout_s: float = 60.0) -> None:
        """Aborts request `rid`, which returns its tokens so far; without an id, every request on the server."""
        ids = [PREFIX + rid] if rid else []
        await self.call("POST", "/abort_requests", {"request_ids": ids}, timeout_s=timeout_s)

    async def checksums(self, *, timeout_s: float = 600.0) -> list[dict[str, str]]:
        """[]: those of /weight_checker are of tensors joined and repacked, on CPUs of none. The probe proves them."""
        return []

    async def load_adapter(self, name: str, directory: str, *, timeout_s: float = 600.0) -> None:
        body = {"lora_name": name, "lora_path": directory}
        await self.call("POST", "/v1/load_lora_adapter", body, timeout_s=timeout_s, reach_s=self.reach_s)

    async def unload_adapter(self, name: str, *, timeout_s: float = 60.0) -> None:
        await self.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s)

    async def adapters(self, *, timeout_s: float = 60.0) -> dict[str, str]:
        """Directories of the loaded adapters by name."""
        answer = await self.call("GET", "/v1/models", timeout_s=timeout_s, reach_s=self.reach_s)
        with answers.named(f"{self.url}/v1/models"):
            return {answers.text(x["id"]): answers.text(x["root"]) for x in answer["data"] if x.get("parent")}

    async def adapter_refusal(self, rank: int, modules: Collection[str], *, timeout_s: float = 30.0) -> str:
        """Why the server cannot load adapters of this rank on these modules; "" if it can."""
        info = (await self.call("GET", "/server_info?config_format=json", timeout_s=timeout_s)).get("vllm_config", {})
        lora = info.get("lora_config") if isinstance(info, dict) else None
        if not isinstance(lora, dict):
            return "serves no adapters (vLLM: --enable-lora)"
        most, room, targets = (lora.get(name) for name in ("max_lora_rank", "max_cpu_loras", "target_modules"))
        if isinstance(most, int) and most < rank:
            return f"supports adapters of rank {most} at most, not {rank} (vLLM: --max-lora-rank)"
        if isinstance(targets, list) and (missing := sorted(set(modules) - {str(target) for target in targets})):
            return f"supports no adapters of {', '.join(missing)} (vLLM: --lora-target-modules)"
        if isinstance(room, int) and room <= ADAPTERS:
            return f"keeps {room} adapters at most, and a push needs {ADAPTERS + 1} (vLLM: --max-cpu-loras)"
        return ""

    async def generate(
        self,
        prompt: Sequence[int] | TokensPrompt,
        sampling: Mapping[str, Any],
        *,
        experts_per_token: int = 0,
        adapter: str = "",
        cache_key: str = "",
        rid: str = "",
        on_tokens: Callable[[list[int]], None] | None = None,
        on_part: Callable[[Part], None] | None = None,
        every: int = 1,
    ) -> Part:
        """Makes one attempt to continue a prompt; arguments and errors as those of `SGLang.generate`. `on_part` is not
        called: each token is an event here, which costs too much, and has no version before the end.

        Log-probabilities are of the distribution that tokens are drawn from, filters (top_p, ...) and grammars
        included, where SGLang's leave these out; training uses none.

        Raises ValueError also for images, which are not sent to vLLM yet, and where the server's log-probabilities are
        not at the temperature sampled at.
        """
        prompt = prompt if isinstance(prompt, TokensPrompt) else TokensPrompt(tuple(prompt))
        if prompt.images:
            raise ValueError(f"{self.url}: images are not sent to vLLM; generate with SGLang or areax serve")
        if sampling.get("sampling_mask"):
            raise ValueError(f"{self.url}: sampling masks of vLLM are not read yet; use areax serve or SGLang")
        if sampling.get("top_logprobs"):
            raise ValueError(f"{self.url}: top_logprobs of vLLM are not read yet; use areax serve or SGLang")
        if self.mode == "raw_logprobs" and sampling.get("temperature", 1.0) != 1:
            raise ValueError(
                f"{self.url}: log-probabilities must be of what is sampled from, at temperature "
                f"{sampling.get('temperature', 1.0):g}; start vLLM with --logprobs-mode processed_logprobs"
            )
        asked = sampling.get("max_new_tokens", LONGEST)
        body = _body(prompt.short(), _parameters(sampling), adapter, cache_key, rid or secrets.token_hex(16))
        most = BESIDES + (len(prompt.tokens) + asked) * (A_TOKEN + EXPERTS * bool(experts_per_token))
        seen, logp = list[int](), list[Any]()
        where = f"{self.url}/inference/v1/generate"

        def on_event(event: Mapping[str, Any]) -> None:  # the new tokens alone
            with answers.named(where):
                self._check_sender(event, body["request_id"], adapter)
                choice = _choice(event)
                new = answers.ids(choice["token_ids"] or [], self.vocabulary)
                seen.extend(new)
                logp.extend(_logprobs(choice))
                answers.check_number(seen, asked)
            if new and on_tokens:
                on_tokens([*seen])

        if on_tokens is None:
            answer = await self.call("POST", "/inference/v1/generate", body, most=most)
        else:
            body |= {"stream": True, "stream_options": {"include_usage": False}}
            answer = await self.call("POST", "/inference/v1/generate", body, on_event=on_event, most=most)
        with answers.named(where):
            choice = dict(_choice(answer))
            if on_tokens is None:
                seen, logp = [], _logprobs(choice)
            else:
                choice["token_ids"] = [*seen]
            part = self._part(answer, choice, logp, body["request_id"], adapter, experts_per_token, len(prompt.tokens))
            answers.check(part, seen, prompt, sampling, asked, self.context)
        if experts_per_token and part.tokens and part.routed is None:
            raise ServerError(f"{where}: got no routed experts; start vLLM with --enable-return-routed-experts")
        return part

    async def read(
        self, tokens: Sequence[int], *, top_k: int = 0, adapter: str = "", cache_key: str = "",
        timeout_s: float | None = None,
    ) -> Part:  # fmt: skip
        """Computes the log-probabilities of `tokens` themselves, at temperature 1; as `SGLang.read`. vLLM samples one
        token more, which is left out."""
        how = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": int(top_k), "logprobs": 0}
        body = _body([int(token) for token in tokens], how, adapter, cache_key, secrets.token_hex(16))
        most = BESIDES + len(tokens) * (1 + top_k) * A_TOKEN
        answer = await self.call("POST", "/inference/v1/generate", body, timeout_s=timeout_s, most=most)
        with answers.named(f"{self.url}/inference/v1/generate"):
            self._check_sender(answer, body["request_id"], adapter)
            rows = [_ranked(row or {}, self.vocabulary) for row in answer["prompt_logprobs"]]
            own = [[row.get(int(token), [None])[0], int(token), None] for row, token in zip(rows, tokens, strict=True)]
            top = [sorted((x for x in row.values() if x[2] <= top_k), key=lambda x: x[2]) for row in rows]
            return Part([], [], [], "length", "", {}, inputs=own, input_top=[[x[:2] for x in row] for row in top])

    async def texts(self, tokens: Sequence[int], *, timeout_s: float = 60.0) -> list[str]:
        """The text of each token by itself, for the server's tokenizer; raises as `SGLang.texts`."""
        ask = lambda token: self.call("POST", "/detokenize", {"tokens": [int(token)]}, timeout_s=timeout_s)
        told = await asyncio.gather(*map(ask, tokens))
        with answers.named(f"{self.url}/detokenize"):
            texts = [one["prompt"] for one in told]
        if not all(isinstance(text, str) for text in texts):
            raise ServerError(f"{self.url}/detokenize: must return a text for each of {len(tokens)} tokens")
        return texts

    def _check_sender(self, answer: Mapping[str, Any], rid: str, adapter: str) -> None:
        """Raises ServerError unless an answer, or an event of one, is to request `rid` and by the adapter asked for."""
        if adapter and "model" in answer and answer["model"] != adapter:
            raise ServerError(f"the answer must be by adapter {adapter!r}, got one by {answer['model']!r:.80}")
        if (name := answer["request_id"]) != PREFIX + rid:
            raise ServerError(
                f"the answer must be to request {rid!r}, got one to {name!r:.80}; look for a proxy that mixes up "
                "answers, or repeats them"
            )

    def _part(
        self, answer: Mapping[str, Any], choice: Mapping[str, Any], logp: Sequence[Any], rid: str, adapter: str,
        experts: int, prompt: int,
    ) -> Part:  # fmt: skip
        """The answer, of a stream the last event with all tokens; raises ServerError, or one of `answers.MALFORMED`."""
        self._check_sender(answer, rid, adapter)
        tokens = answers.ids(choice["token_ids"] or [], self.vocabulary)
        if len(logp) != len(tokens):
            raise ServerError(f"logprobs of {len(logp)} tokens do not belong to the {len(tokens)} ids")
        if (finish := choice["finish_reason"]) not in answers.FINISHES:
            raise ServerError(f"the finish must be one of {', '.join(answers.FINISHES)}, got {finish!r:.80}")
        usage, reason = answer.get("usage") or {"prompt_tokens": prompt}, choice.get("stop_reason")
        return Part(
            tokens=tokens,
            logp=answers.logprobs([*logp]),
            labels=per_token(choice["weight_versions"] or (), len(tokens)),
            finish=finish,
            text=answers.text(choice.get("text")),
            info={
                "id": rid, "prompt_tokens": usage["prompt_tokens"],
                "finish_reason": {"type": finish, "matched": reason if isinstance(reason, int) else None},
                "cached_tokens": positive(usage.get("prompt_tokens_details") or {}, "cached_tokens"),
            },
            routed=_routed(choice.get("routed_experts"), experts),
            adapter=adapter,
        )  # fmt: skip


def _body(
    tokens: Sequence[int], parameters: Mapping[str, Any], adapter: str, cache_key: str, rid: str
) -> dict[str, Any]:
    return {
        "request_id": rid,
        "token_ids": list(tokens),
        "sampling_params": dict(parameters),
        "output_mode": "tokens" if parameters["max_tokens"] == 1 and "prompt_logprobs" in parameters else "text",
        **({"cache_salt": cache_key} if cache_key else {}),
        **({"model": adapter} if adapter else {}),
    }


def _parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters under vLLM's names, with the log probability of each sampled token asked for."""
    given = {RENAMED.get(name, name): value for name, value in sampling.items() if name not in GRAMMARS}
    grammar = {GRAMMARS[name]: value for name, value in sampling.items() if name in GRAMMARS}
    return given | {"logprobs": 0} | ({"structured_outputs": grammar} if grammar else {})


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    [choice] = answer["choices"]
    return choice


def _logprobs(choice: Mapping[str, Any]) -> list[Any]:
    return [one["logprob"] for one in (choice["logprobs"] or {}).get("content") or ()]


def _ranked(row: Mapping[str, Any], vocabulary: int) -> dict[int, list]:
    """{id: [log-probability, id, rank]} of a position of the prompt."""
    found = {answers.token_id(int(name), vocabulary): one for name, one in row.items()}
    return {i: [answers.logprob(one["logprob"]), i, int(one["rank"])] for i, one in found.items()}


def _routed(sent: Any, experts_per_token: int) -> np.ndarray | None:
    """The experts, i32[read, layers, experts a token], which vLLM sends as a .npy file in base64."""
    if not (experts_per_token and sent):
        return None
    file = io.BytesIO(base64.b64decode(sent, validate=True))
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(file)
    except Exception as error:  # its header is parsed as Python
        raise ServerError(f"routed experts must be a .npy file ({answers.described(error)})") from error
    data = file.read()
    whole = dtype.kind in "iu" and len(shape) == 3 and shape[2] == experts_per_token and not by_columns
    if not whole or len(data) != math.prod(shape) * dtype.itemsize:
        raise ServerError(f"routed experts must be {experts_per_token} per layer and token, got {dtype}{list(shape)}")
    made = np.frombuffer(data, dtype).reshape(shape)
    if made.size and not 0 <= int(made.min()) <= int(made.max()) < 2**31:
        raise ServerError(f"routed experts must be numbers from 0 on, got {made.min()} to {made.max()}")
    return made.astype(np.int32)
