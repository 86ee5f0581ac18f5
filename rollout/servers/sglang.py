"""SGLang's HTTP interface: every route and field name that areax relies on.

The embedded engine (`areax serve`) implements the same routes. To support another kind of server, write another file
with the methods of `SGLang`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ServerError
from . import answers, sglang_answers
from .answers import A_LIKELY, A_TOKEN, AN_ID, BESIDES, EXPERTS, LONGEST
from .concurrency import Report
from .endpoint import Endpoint
from .image_tokens import TokensPrompt
from .types import Description, Part, Reported

log = logging.getLogger(__name__)

READS = 3  # of a prompt, which another program may abort
LAYOUT = ("dtype", "quantization", "tp_size", "pp_size", "ep_size", "load_format", "version")  # fields of /server_info


@dataclass(eq=False)
class SGLang(Endpoint):
    """The calls to one server.

    Attributes:
      vocabulary: number of the model's tokens, whose ids it may return; 0 = unknown.
      context: as in `Description`, once it has been described.
      has_checksums: it reports checksums of its weights; None = unknown.
      names_answers: its answers have had the name of their request.
    """

    vocabulary: int = 0
    context: int = 0
    has_checksums: bool | None = None
    names_answers: bool = False

    async def describe(self, *, timeout_s: float) -> Description:
        """The server's own description; raises as `call`."""
        weights = await self.reported_weights(timeout_s=timeout_s)
        info = await self.server_info(timeout_s=timeout_s)
        self.context = sglang_answers.context(info)
        return Description(
            weights=weights,
            seeded=info.get("enable_deterministic_inference") is True,
            stages=info.get("stages_weights") is True,
            ranks=answers.positive(info, "tp_size") or 1,
            layout=json.dumps([info.get(name) for name in LAYOUT]),
            released=any(state.get("released") for state in sglang_answers.states(info)),
            capacity=answers.positive(info, "max_total_num_tokens"),
            slots=sglang_answers.slots(info),
            context=self.context,
        )

    async def health(self, *, timeout_s: float = 20.0) -> bool:
        """Whether it generates; False while it starts up and while generation is paused."""
        try:
            await self.call("GET", "/health", timeout_s=timeout_s, reach_s=0.0)
        except ServerError:
            return False
        return True

    async def server_info(self, *, timeout_s: float = 60.0) -> dict:
        return await self.call("GET", "/server_info", timeout_s=timeout_s)

    async def reported_load(self, *, timeout_s: float = 60.0) -> Report | None:
        """Its queue and memory use, summed over its replicas; None if it does not report them."""
        try:
            return sglang_answers.load_report(await self.call("GET", "/v1/loads", timeout_s=timeout_s))
        except (ServerError, ValueError):  # whether the server is up at all is checked elsewhere
            return None

    async def reported_weights(self, *, timeout_s: float = 60.0, reach_s: float | None = None) -> Reported:
        """The label that it reports for its weights, and the folder that it last loaded them from."""
        answer = await self.call("GET", "/model_info", timeout_s=timeout_s, reach_s=reach_s)
        label, source = answer.get("weight_version"), answer.get("model_path")
        if not isinstance(label, str):
            raise ServerError(f"{self.url}/model_info: no weight_version in the answer")
        return Reported(label, source if isinstance(source, str) else "")

    async def pause(self, mode: str = "retract", *, timeout_s: float = 60.0, reach_s: float | None = None) -> None:
        """Stops generation: `abort` returns running requests, `retract` requeues them, `in_place` freezes them."""
        await self.call("POST", "/pause_generation", {"mode": mode}, timeout_s=timeout_s, reach_s=reach_s)

    async def resume(self, *, timeout_s: float = 60.0) -> None:
        """Continues generation after a pause."""
        await self.call("POST", "/continue_generation", {}, timeout_s=timeout_s, reach_s=self.reach_s)

    async def update_weights_from_disk(
        self, path: str, label: str, *, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        """Loads the checkpoint directory `path`, as the server sees it, as version `label`."""
        body = {"model_path": path, "weight_version": label, "flush_cache": flush_cache}
        await self.call(
            "POST", "/update_weights_from_disk", body, timeout_s=timeout_s, reach_s=self.reach_s, must_succeed=True
        )

    async def stage_weights_from_disk(self, path: str, *, timeout_s: float = 600.0) -> None:
        """Reads the checkpoint directory `path` into memory beside the current weights, ahead of an update."""
        await self.call(
            "POST", "/stage_weights_from_disk", {"model_path": path}, timeout_s=timeout_s, reach_s=self.reach_s
        )

    async def begin_weight_update(self, *, timeout_s: float = 60.0) -> None:
        """Opens a session of `update_weights_from_tensor`; closes one that was left open."""
        with contextlib.suppress(ValueError):  # the normal case: none is open
            await self.call("POST", "/end_weight_update", {}, timeout_s=timeout_s, reach_s=self.reach_s)
        await self.call(
            "POST", "/begin_weight_update", {}, timeout_s=timeout_s, reach_s=self.reach_s, must_succeed=True
        )

    async def update_weights_from_tensor(
        self, parts: Sequence[str], *, label: str = "", flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        """Sends serialised tensors, one string per rank; the last message of a version carries its label."""
        body = {"serialized_named_tensors": list(parts), "flush_cache": flush_cache}
        body |= {"weight_version": label} if label else {}
        await self.call(
            "POST", "/update_weights_from_tensor", body, timeout_s=timeout_s, reach_s=self.reach_s, must_succeed=True
        )

    async def end_weight_update(self, *, timeout_s: float = 60.0) -> None:
        await self.call("POST", "/end_weight_update", {}, timeout_s=timeout_s, reach_s=self.reach_s, must_succeed=True)

    async def release_memory(self, *, timeout_s: float = 120.0) -> None:
        """Frees the memory of weights and caches; generation must be paused."""
        await self.call("POST", "/release_memory_occupation", {}, timeout_s=timeout_s, reach_s=self.reach_s)

    async def resume_memory(self, *, timeout_s: float = 120.0) -> None:
        """Allocates that memory again. SGLang crashes if this is called twice, or before any release."""
        await self.call("POST", "/resume_memory_occupation", {}, timeout_s=timeout_s, reach_s=self.reach_s)

    async def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        await self.call("POST", "/flush_cache", {}, timeout_s=timeout_s)

    async def abort(self, rid: str = "", *, timeout_s: float = 60.0) -> None:
        """Aborts request `rid`, which returns its tokens so far; without an id, every request on the server."""
        await self.call("POST", "/abort_request", {"rid": rid, "abort_all": not rid}, timeout_s=timeout_s)

    async def checksums(self, *, timeout_s: float = 600.0) -> list[dict[str, str]]:
        """The server's own checksums by tensor name, one dict per rank; [] of a server that has none.

        It has none if it refuses twice to report them and has never reported any; that is logged once. After one wrong
        answer it is asked again.

        Raises ServerError as `call`; two answers without checksums, or a refusal after it has reported some.
        """
        refused, wrong, body = 0, 0, {"action": "checksum"}
        while self.has_checksums is not False:
            try:
                answer = await self.call("POST", "/weights_checker", body, timeout_s=timeout_s, reach_s=self.reach_s)
                ranks = sglang_answers.checksums(answer, f"{self.url}/weights_checker")
            except ServerError:
                wrong += 1
                if wrong == 2:
                    raise
            except ValueError as error:
                refused += 1
                if refused < 2:
                    continue
                if self.has_checksums:
                    raise ServerError(f"{error}; it must report checksums, as it did before") from error
                self.has_checksums = False
                log.warning("%s reports no checksums, so only the probe verifies its weights (%s)", self.url, error)
            else:
                self.has_checksums = True
                return ranks
        return []

    async def load_adapter(self, name: str, directory: str, *, timeout_s: float = 600.0) -> None:
        body = {"lora_name": name, "lora_path": directory}
        await self.call(
            "POST", "/load_lora_adapter", body, timeout_s=timeout_s, reach_s=self.reach_s, must_succeed=True
        )

    async def unload_adapter(self, name: str, *, timeout_s: float = 60.0) -> None:
        await self.call("POST", "/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s)

    async def adapters(self, *, timeout_s: float = 60.0) -> dict[str, str]:
        """Directories of the loaded adapters by name."""
        answer = await self.call("GET", "/v1/models", timeout_s=timeout_s, reach_s=self.reach_s)
        try:
            cards = {card["id"]: card["root"] for card in answer["data"] if card.get("parent")}
            if not all(isinstance(text, str) for card in cards.items() for text in card):
                raise TypeError("an adapter's id and root must be text")
            return cards
        except answers.MALFORMED as error:
            raise ServerError(f"{self.url}/v1/models: not a list of models ({answers.described(error)})") from error

    async def adapter_refusal(self, rank: int, modules: Collection[str], *, timeout_s: float = 30.0) -> str:
        """Why the server cannot load adapters of this rank on these modules (names as in checkpoints); "" if it can."""
        return sglang_answers.adapter_refusal(await self.server_info(timeout_s=timeout_s), rank, modules)

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
        """Makes one attempt to continue a prompt, tokens alone or with images.

        Args:
          sampling: temperature, top_p, ... as `Fleet.generate` takes them; `seed` and empty values may be missing.
          experts_per_token: the model's top_k, to also report the experts of each token; 0 = do not. SGLang sends
            them without their shape.
          adapter: the adapter to use; "" = none.
          cache_key: requests with different keys share no cached prefix.
          rid: a name for `abort`, which no other request has; "" = a random one.
          on_tokens: called with all ids so far whenever there are new ones; the answer is then streamed.
          on_part: called likewise with what the answer would be if it was aborted there; its labels are "" if the
            server does not say them before the end, as SGLang does not.
          every: new tokens after which it is called.

        Raises:
          Unreached, Broken: as `Endpoint.call`.
          ServerError: an answer that breaks the contract, or to another request; the server reads another number of
            tokens in the images.
          ValueError: the server refused the request.
        """
        prompt = prompt if isinstance(prompt, TokensPrompt) else TokensPrompt(tuple(prompt))
        body = _body(prompt, sampling, adapter, cache_key, rid)
        if experts_per_token:
            body["return_routed_experts"] = True
        asked, masked = sampling.get("max_new_tokens", LONGEST), sampling.get("sampling_mask", False)
        top_k, top = sampling["top_k"] if masked else 0, sampling.get("top_logprobs", 0)
        seen: list[int] = []

        def checked(answer: Mapping[str, Any], experts: int = 0) -> Part:
            part = self._part(answer, body["rid"], experts, top_k=top_k, top=top)
            with answers.named(f"{self.url}/generate"):
                answers.check(part, seen, prompt, sampling, asked, self.context)
            return part

        def on_event(event: Mapping[str, Any]) -> None:
            nonlocal seen
            ids = self._ids(event)
            with answers.named(f"{self.url}/generate"):
                answers.check_number(ids, asked)
                answers.check_stream(seen, ids)
                so_far = sglang_answers.unfinished(event) if on_part else None
            if len(ids) > len(seen):  # an event without new tokens is no progress
                seen = ids
                if on_tokens:
                    on_tokens(ids)
                if on_part and so_far:
                    on_part(checked(so_far))

        a_token = A_TOKEN + EXPERTS * bool(experts_per_token) + AN_ID * top_k + A_LIKELY * top
        most = BESIDES + (len(prompt.tokens) + asked) * a_token
        if on_tokens or on_part:
            body["sampling_params"] |= {"stream_interval": every} if every > 1 else {}
            answer = await self.call("POST", "/generate", body | {"stream": True}, on_event=on_event, most=most)
        else:
            answer = await self.call("POST", "/generate", body, most=most)
        part = checked(answer, experts_per_token)
        if experts_per_token and part.tokens and part.routed is None:
            raise ServerError(
                f"{self.url}/generate: routed experts were asked for, got none; start SGLang with "
                "--enable-return-routed-experts"
            )
        return part

    async def read(
        self,
        tokens: Sequence[int],
        *,
        top_k: int = 0,
        adapter: str = "",
        cache_key: str = "",
        timeout_s: float | None = None,
    ) -> Part:
        """Computes the log-probabilities of `tokens` themselves, at temperature 1; generates nothing.

        Args:
          top_k: also report this many of the most likely tokens at each position.
          timeout_s: as in `Endpoint.call`.

        Raises as `generate`.
        """
        body = _body(TokensPrompt(tuple(tokens)), {"temperature": 1.0, "max_new_tokens": 0}, adapter, cache_key) | {
            "logprob_start_len": 0
        }
        if top_k:
            body["top_logprobs_num"] = int(top_k)
        most = BESIDES + len(tokens) * (1 + top_k) * A_TOKEN
        for _ in range(READS):
            answer = await self.call("POST", "/generate", body, timeout_s=timeout_s, most=most)
            if not sglang_answers.aborted(answer):
                return self._part(answer, body["rid"], generated=False)
        raise ServerError(
            f"{self.url}/generate: aborted {READS} requests to read a prompt; is another run, or program, using it?"
        )

    async def texts(self, tokens: Sequence[int], *, timeout_s: float = 60.0) -> list[str]:
        """The text of each token by itself, for the server's tokenizer.

        Raises:
          ValueError: the server has no tokenizer, or a smaller one.
          ServerError: as `Endpoint.call`; an answer that is not one text for each token.
        """
        body = {"tokens": [[int(token)] for token in tokens], "skip_special_tokens": False}
        texts = (await self.call("POST", "/detokenize", body, timeout_s=timeout_s)).get("text")
        if not (isinstance(texts, list) and len(texts) == len(tokens) and all(isinstance(x, str) for x in texts)):
            raise ServerError(f"{self.url}/detokenize: must return a text for each of {len(tokens)} tokens")
        return texts

    def _ids(self, event: Mapping[str, Any]) -> list[int]:
        try:
            return answers.ids(event["output_ids"], self.vocabulary)
        except (KeyError, ServerError) as error:
            raise ServerError(
                f"{self.url}/generate: an event lacks the tokens so far ({answers.described(error)})"
            ) from error

    def _part(
        self, answer: Mapping[str, Any], rid: str, experts_per_token: int = 0, *, generated: bool = True,
        top_k: int = 0, top: int = 0,
    ) -> Part:  # fmt: skip
        with answers.named(f"{self.url}/generate"):
            part = sglang_answers.part(answer, experts_per_token, generated, self.vocabulary, top_k, top)
        name = part.info.get("id")
        self.names_answers |= name is not None
        if name != rid and self.names_answers:
            raise ServerError(
                f"{self.url}/generate: the answer must be to request {rid!r}, got one to {name!r:.80}; look for a "
                "proxy that mixes up answers, or repeats them"
            )
        return part


def _body(
    prompt: TokensPrompt, sampling: Mapping[str, Any], adapter: str, cache_key: str, rid: str = ""
) -> dict[str, Any]:
    params = {("sampling_seed" if name == "seed" else name): value for name, value in sampling.items()}
    masked, top = params.pop("sampling_mask", False), params.pop("top_logprobs", 0)
    return {
        "input_ids": prompt.short(),
        **({"image_data": prompt.data()} if prompt.images else {}),
        "sampling_params": params,
        "return_logprob": True,
        "rid": rid or secrets.token_hex(16),
        **({"return_sampling_mask": True} if masked else {}),
        **({"top_logprobs_num": top} if top else {}),
        **({"extra_key": cache_key} if cache_key else {}),
        **({"lora_path": adapter} if adapter else {}),
    }
