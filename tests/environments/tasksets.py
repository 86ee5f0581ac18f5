"""A taskset as verifiers from 0.4 on has them, with a program that plays its tasks."""

import sys

import verifiers.v1 as vf

PROGRAM = """
import json, sys, urllib.request

endpoint, secret, prompt = sys.argv[1:]
add = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
messages = [{"role": "user", "content": prompt}]
for _ in range(6):
    body = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": add}]}
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint}/chat/completions", json.dumps(body).encode(), headers)
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(said)
    if not said.get("tool_calls"):
        break
    for call in said["tool_calls"]:
        total = sum(json.loads(call["function"]["arguments"]).values())
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})
"""


class Data(vf.TaskData):
    answer: str


class SumTask(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.name == "unscored":
            raise KeyError("answer")
        if self.data.name == "judged":
            raise vf.ProviderError("this model's maximum context length is 8192 tokens", status_code=400)
        return float((trace.nodes[-1].message.content or "").strip() == self.data.answer)

    @vf.metric
    async def messages(self, trace: vf.Trace) -> float:
        return float(len(trace.nodes))


class SumConfig(vf.TasksetConfig):
    first: int = 0
    endless: bool = False
    broken: bool = False
    judged: bool = False


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        self.INFINITE = self.config.endless
        name = "unscored" if self.config.broken else "judged" if self.config.judged else None
        n = self.config.first
        while self.config.endless or n < self.config.first + 3:
            yield SumTask(Data(prompt=f"What is {n} + 1?", answer=str(n + 1), name=name), self.config.task)
            n += 1

    @property
    def bounded(self):
        return not self.config.endless


class SumHarnessConfig(vf.HarnessConfig):
    program: str = PROGRAM


class SumHarness(vf.Harness[SumHarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        return await runtime.run_program([sys.executable, "-c", self.config.program, endpoint, secret, data.prompt], {})


__all__ = ["SumHarness", "SumTaskset"]
