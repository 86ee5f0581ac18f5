"""Which kind of server answers at an address: vLLM, or one with SGLang's API."""

from __future__ import annotations

import aiohttp

from .endpoint import Missing
from .sglang import SGLang
from .vllm import VLLM


async def found(
    url: str, http: aiohttp.ClientSession, *, ready_s: float, reach_s: float = 5.0, key_variable: str = "",
    vocabulary: int = 0,
) -> SGLang | VLLM:  # fmt: skip
    """The calls to the server at `url` once it answers: those of vLLM if it has /version, and not SGLang's /model_info.

    Raises:
      ValueError: it has neither, or refuses the key.
      ServerError: it does not answer within `ready_s` seconds.
    """
    own = SGLang(url, http, reach_s, key_variable, vocabulary)
    try:
        await own.call("GET", "/model_info", timeout_s=ready_s)
    except Missing as error:
        other = VLLM(url, http, reach_s, key_variable, vocabulary)
        try:
            await other.call("GET", "/version", timeout_s=ready_s)
        except Missing:
            raise ValueError(f"{url}: must be SGLang, vLLM or areax serve, got a server without its routes") from error
        return other
    return own
