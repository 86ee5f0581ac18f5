"""What `areax serve` does with every field of every OpenAI and Anthropic request; docs/serve.md has the same tables.

The gateway's tables, but for what the engine adds: seeds, likeliest tokens, penalties, grammars, SGLang's extensions.
"""

from __future__ import annotations

from ...chat import fields
from ...chat.api import chat, completions, messages, responses
from ...chat.fields import NO_EFFECT, Refusal, Table
from .request_parsing import SAMPLING

STORE = Refusal("nothing is stored; send the whole conversation each time", (False,))
_SGLANG = fields.table(
    [
        "stop_token_ids", "ignore_eos", "rid", "return_meta_info", "lora_path", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "logit_bias", "response_format", "json_schema", "regex", "ebnf",
    ],
    [
        "priority", "extra_key", "cache_salt", "session_id", "custom_labels", "data_parallel_rank", "log_metrics",
        "return_cached_tokens_details", "return_spec_tokens_details",
    ],
    {
        "store": STORE,
        **{
            name: SAMPLING[name]
            for name in ("stop_regex", "no_stop_trim", "skip_special_tokens", "custom_params", "watermark")
        },
        **dict.fromkeys(  # vLLM's
            (
                "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                "guided_decoding_backend",
            ),
            Refusal("give a response_format, a json_schema, a regex or an ebnf"),
        ),
        "custom_logit_processor": Refusal("this server runs no code of its clients", ("",)),
        "watermark": Refusal(but=(False,)),
        "session_params": Refusal("the prefix cache needs no sessions", ({},)),
        "return_hidden_states": Refusal("/generate has all that this server returns", (False,)),
        "return_routed_experts": Refusal("ask /generate for them", (False,)),
        "return_token_ids": Refusal("ask /generate, or for return_meta_info", (False,)),
    },
)  # fmt: skip
COMPLETIONS: Table = {**completions.FIELDS, **_SGLANG}
CHAT: Table = {
    **chat.FIELDS,
    **_SGLANG,
    "top_logprobs": fields.USED,
    "continue_final_message": Refusal("an answer is a new message; use /v1/completions", (False,)),
    "add_generation_prompt": Refusal("an answer is a new message; use /v1/completions", (True,)),
    "separate_reasoning": Refusal("start the server with --no-reasoning", (True,)),
    "stream_reasoning": Refusal("reasoning is streamed as it comes", (True,)),
}
RESPONSES: Table = responses.FIELDS
MESSAGES: Table = messages.FIELDS
COUNT: Table = {
    **MESSAGES,
    **dict.fromkeys(("stream", "stop_sequences", "max_tokens", "temperature", "top_p", "top_k"), NO_EFFECT),
}
TABLES: dict[str, Table] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT,
}
