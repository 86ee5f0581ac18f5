"""Every server of ours as a process of its own, with valid requests for each of its routes: what `fuzz` spoils.

`python hostile_servers.py gateway` and `... files FOLDER` serve what in a run is part of the trainer.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import servers
import tiny
from fuzz import Route

KEYS = {"AREAX_STAGER_KEY": "k", "AREAX_SANDBOX_KEY": "k"}
NAMES = ("engine", "gateway", "stager", "files", "sandbox")
PROMPT = [5, 6, 7]
SAMPLING = {
    "temperature": 1.0, "max_new_tokens": 3, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "min_new_tokens": 0, "n": 1,
    "stop": ["1"], "stop_token_ids": [3], "ignore_eos": False, "sampling_seed": 1,
}  # fmt: skip
USER = [{"role": "user", "content": "1+1"}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHAT = [
    *USER,
    {"role": "assistant", "content": "a", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "x"},
]
FUNCTION = {
    "name": "add",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}


@dataclass
class Server:
    """A running server.

    Attributes:
      routes: valid requests.
      upkeep: requests that undo what others may have done, such as pauses.
    """

    port: int
    process: subprocess.Popen
    routes: list
    upkeep: list


@contextlib.contextmanager
def running(name: str, folder: Path):
    """Runs the server of this name; files that it needs go to `folder`."""
    if name == "engine":
        path = tiny.model(folder / "model", max_position_embeddings=4096)
        with servers.embedded(path, context=256, slots=4) as remote:
            yield Server(remote.port, remote.process, *engine(str(path)))
        return
    command = {
        "gateway": [__file__, "gateway"],
        "files": [__file__, "files", str(folder)],
        "stager": ["-m", "areax.rollout.weights.stager", "--root", str(folder), "--port", "0"],
        "sandbox": ["-m", "areax.rollout.sandbox.remote", "--port", "0"],
    }[name]
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | KEYS
    )
    with servers.ended(process):
        url, *more = process.stdout.readline().split()
        routes = {"gateway": gateway, "files": files}.get(name)
        found = routes(*more) if routes else {"stager": stager, "sandbox": sandbox}[name](url)
        yield Server(int(url.rpartition(":")[2]), process, found, [])


def engine(path: str) -> tuple[list[Route], list[Route]]:
    post = lambda path, body: Route("POST", path, body)
    get = lambda path: Route("GET", path)
    generate = {"input_ids": PROMPT, "sampling_params": SAMPLING, "rid": "r", "stream": False}
    update = {"model_path": path, "weight_version": "v", "flush_cache": True, "abort_all_requests": True}
    chat = {"messages": USER, "max_tokens": 2, "logprobs": True, "top_logprobs": 1, "n": 1}
    routes = [
        post("/generate", generate | {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}),
        post("/generate", {"text": "1+1", "sampling_params": {"max_new_tokens": 2}, "lora_path": None, "stream": True}),
        post("/generate", {"input_ids": [PROMPT, PROMPT], "sampling_params": [SAMPLING] * 2, "rid": ["a", "b"]}),
        post(
            "/generate", {"text": "1", "sampling_params": {"max_new_tokens": 2, "regex": "1+", "logit_bias": {"5": 1}}}
        ),
        post("/generate", {"text": "1", "sampling_params": {"max_new_tokens": 2, "json_schema": '{"enum": [1]}'}}),
        post("/v1/chat/completions", {"messages": USER, "max_tokens": 2, "response_format": SCHEMA}),
        post("/v1/completions", {"prompt": "1", "max_tokens": 2, "ebnf": 'root ::= "1"', "presence_penalty": 0.5}),
        post("/v1/completions", {"prompt": "1+1", "max_tokens": 2, "logprobs": 1, "echo": True, "n": 1, "stop": ["1"]}),
        post("/v1/completions", {"prompt": [[5, 6], [7]], "seed": 1, "min_tokens": 1, "model": "x", "stream": True}),
        post("/v1/chat/completions", chat | {"stream": True, "stream_options": {"include_usage": True}}),
        post(
            "/v1/chat/completions",
            chat | {"tools": [], "tool_choice": "none", "chat_template_kwargs": {}, "model": "x"},
        ),
        post("/v1/responses", {"input": "1+1", "max_output_tokens": 2, "text": {}, "tools": [], "stream": True}),
        post("/v1/messages", {"messages": USER, "max_tokens": 2, "system": "1", "thinking": None, "stream": True}),
        post("/v1/messages/count_tokens", {"messages": USER, "tools": [], "model": "x"}),
        post("/tokenize", {"prompt": ["1+1", "2"], "add_special_tokens": False}),
        post("/tokenize", {"messages": USER, "chat_template_kwargs": {}, "add_generation_prompt": True}),
        post("/detokenize", {"tokens": [[5, 6], [7]], "skip_special_tokens": True}),
        post("/pause_generation", {"mode": "abort"}),
        post("/continue_generation", {}),
        post("/abort_request", {"rid": "r", "abort_all": False}),
        post("/flush_cache", {}),
        get("/flush_cache"),
        post("/release_memory_occupation", {"tags": ["kv_cache"]}),
        post("/resume_memory_occupation", {"tags": ["kv_cache"]}),
        post("/stage_weights_from_disk", {"model_path": path, "load_format": None}),
        post("/update_weights_from_disk", update),
        post("/update_weight_version", {"new_version": "v", "abort_all_requests": True}),
        post("/weights_checker", {"action": "checksum"}),
        post("/load_lora_adapter", {"lora_name": "a", "lora_path": path}),
        post("/unload_lora_adapter", {"lora_name": "a"}),
        *map(
            get,
            [
                "/weights_checker",
                "/health",
                "/ready",
                "/model_info",
                "/server_info",
                "/v1/loads",
                "/v1/models/a",
                "/metrics",
                "/openapi.json",
            ],
        ),
    ]
    upkeep = [("/continue_generation", {}), ("/resume_memory_occupation", {})]
    return routes, [post(*one) for one in (*upkeep, ("/update_weights_from_disk", {"model_path": path}))]


def gateway(key: str, session: str) -> list[Route]:
    mine, admin = ({"authorization": f"Bearer {one}"} for one in (key, "the admin's"))
    post = lambda path, body, headers=mine: Route("POST", path, {"model": "m", **body}, headers)
    get = lambda path: Route("GET", path, {}, mine)
    reward = lambda body: Route("POST", f"/sessions/{session}/reward", body, mine)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "y"}]}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "z"}
    use = [{"type": "thinking", "thinking": "t"}, {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": use},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
    ]
    tools = [{"name": "add", "description": "d", "input_schema": {"type": "object"}}]
    chat = {"messages": CHAT, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "n": 1}
    chat |= {"stop": ["x"], "temperature": 1.0, "top_p": 1.0, "max_tokens": 3, "logprobs": True, "stream": False}
    chat |= {"response_format": SCHEMA, "chat_template_kwargs": {"enable_thinking": True}}
    anthropic = {"messages": messages, "max_tokens": 3, "system": "s", "tools": tools, "tool_choice": {"type": "auto"}}
    anthropic |= {"thinking": {"type": "enabled", "budget_tokens": 5}, "stop_sequences": ["x"], "top_k": 3}
    return [
        post("/v1/chat/completions", chat),
        post("/v1/chat/completions", {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}),
        post("/v1/completions", {"prompt": "x", "max_tokens": 2, "echo": False, "logprobs": 0, "stop": "x", "n": 1}),
        post("/v1/completions", {"prompt": [[5, 6]], "temperature": 1.0, "stream": True}),
        post("/v1/responses", {"input": [item, thought, call, result], "tools": [{"type": "function", **FUNCTION}],
                               "instructions": "i", "max_output_tokens": 4, "text": {"format": {"type": "text"}}}),
        post("/v1/responses", {"input": "x", "stream": True, "metadata": {"a": "b"}}),
        post("/v1/messages", anthropic | {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        post("/v1/messages", {"messages": USER, "max_tokens": 3, "stream": True}),
        post("/v1/messages/count_tokens", {"messages": USER}),
        post("/sessions", {"task": "x"}, admin),
        reward({"value": 1, "interaction": "x"}),
        reward({"value": {"reward": 1, "a": 1}}),
        *map(get, ["/v1/models", "/health", f"/sessions/{session}/trajectories?style=leaves&discount=1"]),
    ]  # fmt: skip


def stager(url: str) -> list[Route]:
    """The server itself stands for a file server: it has no version."""
    body = {"label": "1-00000000", "sources": [url], "source_key": "s"}
    headers = {"authorization": "Bearer k"}
    return [Route("POST", "/stage", body, headers), Route("GET", "/versions", {}, headers), Route("GET", "/health")]


def files(key: str, label: str) -> list[Route]:
    headers = {"authorization": f"Bearer {key}"}
    paths = [f"/{label}", f"/{label}/model.safetensors", f"/{label}?base={label}", "/1-00000000", f"/{label}/x"]
    return [*(Route("GET", path, {}, headers) for path in paths), Route("POST", "/parts/1-00000000", {}, headers)]


def sandbox(url: str) -> list[Route]:
    limits = {
        "timeout_s": 1.0,
        "cpu_s": 1,
        "memory_bytes": 2**28,
        "output_bytes": 1000,
        "files_bytes": 1000,
        "processes": 9,
    }
    body = {"code": "print(1)", "stdin": "", "limits": limits | {"processes": 9}}
    return [Route("POST", "/run", body, {"authorization": "Bearer k"}), Route("GET", "/health")]


async def serve_gateway() -> None:
    import gateways

    from areax.rollout.chat.session import Session
    from areax.rollout.gateway.server import serve

    class Engine(gateways.Engine):
        async def __call__(self, prompt, **sampling):
            if len(prompt) > 4096:
                raise ValueError("the prompt is longer than the context")
            self.prompts, self.asked = [], []
            return await super().__call__(prompt, **sampling)

    engine = Engine()

    async def on_start(wanted):
        return Session(engine, gateways.TOKENS)

    async with serve(gateways.TOKENS, admin_key="the admin's", on_start=on_start) as gateway:
        session = Session(engine, gateways.TOKENS)
        print(gateway.url, gateway.open(session), session.id, flush=True)
        await asyncio.Event().wait()


async def serve_files(folder: str) -> None:
    from areax.rollout.servers.labels import read_label
    from areax.rollout.servers.types import Published
    from areax.rollout.weights import file_server

    path = Path(folder) / "1"
    path.mkdir()
    (path / "model.safetensors").write_bytes(bytes(100_000))
    (path / "manifest.json").write_text(json.dumps({"version": 1}))
    async with file_server.serve("127.0.0.1") as served:
        one = Published(str(path), read_label(path / "manifest.json"))
        served.offer(one)
        print(served.url, served.key, one.label, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_gateway() if sys.argv[1] == "gateway" else serve_files(sys.argv[2]))
