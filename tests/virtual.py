"""Generation servers under a virtual clock that fail on cue and know which weights sampled each token."""

import asyncio
import json
import types

import aiohttp
from scripted import reply

from areax.rollout.servers.labels import version_of
from areax.rollout.simulation import clock

BASE = "999-"  # prefix of the label of the base weights under adapters


def token_at(index):
    return (7 * index + 3) % 50


class Engine:
    """One server: tokens and their labels depend on its current state; failures are injected from outside.

    The log-probability of a token is minus the version of the weights that really sampled it, and that version is -1
    before the first load. With an adapter it is the adapter's version, if the base weights are BASE.

    Attributes:
      weights, label: what it samples with, and what it reports; they differ after a failed load.
      adapters: name -> directory of the loaded ones.
      alive, hung: whether it accepts connections, and whether it never answers.
      faults: path -> fault of the next call: "refuse" (error, nothing done), "late" (done, but answered with an error),
        "lie" (done, old label kept), "half" (not done, but labelled so), "cut" (done, the connection breaks).
      busy: how many /generate calls are answered with 503 first.
    """

    def __init__(self, step_s):
        self.step_s = step_s
        self.weights = self.label = "default"
        self.adapters: dict[str, str] = {}
        self.alive, self.hung, self.paused, self.busy = True, False, False, 0
        self.faults, self.epoch, self.aborts = {}, 0, 0
        self.changed = asyncio.Event()

    def tick(self):
        self.changed.set()
        self.changed = asyncio.Event()

    def die(self):
        self.alive, self.epoch = False, self.epoch + 1
        self.tick()

    def revive(self):
        self.__init__(self.step_s)

    async def answer(self, path, body):
        """(status, text); a broken connection raises the exception of aiohttp."""
        if not self.alive:
            where = types.SimpleNamespace(ssl=True, host="engine", port=0)
            raise aiohttp.ClientConnectorError(where, OSError("refused"))
        epoch = self.epoch
        work = asyncio.ensure_future(self._answer(path, body))
        try:
            while not work.done() or self.hung:
                if self.epoch != epoch:
                    raise aiohttp.ServerDisconnectedError()
                waiting = asyncio.ensure_future(self.changed.wait())
                await asyncio.wait([waiting, *([work] if not work.done() else [])], return_when="FIRST_COMPLETED")
                waiting.cancel()
            if self.epoch != epoch:
                raise aiohttp.ServerDisconnectedError()
            return work.result()
        finally:
            work.cancel()

    async def _answer(self, path, body):
        await asyncio.sleep(0.001)
        fault = self.faults.pop(path, None)
        if fault == "refuse":
            return 500, "{}"
        if path == "/generate":
            if self.busy:
                self.busy -= 1
                return 503, "busy"
            name = body.get("lora_path")
            if name and name not in self.adapters:
                return 400, json.dumps({"error": {"message": f"never loaded: {name}"}})
            answer = await self._generate(body)
        else:
            answer = await self._control(path, body, fault)
        if fault == "late":
            return 500, "{}"
        if fault == "cut":
            raise aiohttp.ClientPayloadError("cut off")
        return 200, json.dumps(answer)

    async def _control(self, path, body, fault):
        if path == "/pause_generation":
            self.paused = True
            self.aborts += body["mode"] == "abort"
        if path == "/continue_generation":
            self.paused = False
        if path == "/update_weights_from_disk":
            await asyncio.sleep(0.5)
            self.weights = self.weights if fault == "half" else body["weight_version"]
            self.label = self.label if fault == "lie" else body["weight_version"]
        if path == "/load_lora_adapter":
            await asyncio.sleep(0.1)
            if fault != "lie":
                self.adapters[body["lora_name"]] = body["lora_path"]
        if path == "/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        if path == "/v1/models":
            cards = [{"id": name, "root": where, "parent": "base"} for name, where in self.adapters.items()]
            return {"data": [{"id": "base", "root": "base", "parent": None}, *cards]}
        self.tick()
        if path == "/model_info":
            return {"weight_version": self.label}
        if path == "/weights_checker":
            return {"ranks": [{"checksums": {"all.joined": self.weights}}]}
        return {"success": True, "message": "done"}

    async def _generate(self, body):
        aborts, first = self.aborts, len(body["input_ids"])
        ids, labels, truth, finish = [], [], [], "length"
        for index in range(first, first + body["sampling_params"]["max_new_tokens"]):
            await asyncio.sleep(self.step_s)
            while self.paused and self.aborts == aborts:
                await self.changed.wait()
            if self.aborts != aborts:
                finish = "abort"
                break
            ids.append(token_at(index))
            labels.append(self.label)
            truth.append(-float(max(0, version_of(self.sampling(body)))))
        answer = reply(ids, truth, labels, finish)
        if "logprob_start_len" in body:  # the prompt is prefilled with the current weights
            known = [[-float(max(0, version_of(self.sampling(body)))), token, None] for token in body["input_ids"][1:]]
            answer["meta_info"]["input_token_logprobs"] = [[None, body["input_ids"][0], None], *known]
        return answer

    def sampling(self, body):
        """The version that a request is sampled with at this moment."""
        name = body.get("lora_path")
        return name if name and self.weights.startswith(BASE) else self.weights


class Network(clock.Network):
    """The transport to all engines; `start` adds one."""

    def start(self, step_s):
        url = f"http://engine{len(self.servers)}"
        self.servers[url] = Engine(step_s)
        return url
