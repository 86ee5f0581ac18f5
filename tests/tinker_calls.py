"""Bodies of Tinker's API for tests, and a client that speaks it through Starlette's test client."""

import contextlib

import numpy as np
from starlette.testclient import TestClient

from areax.rollout.servers.engine_options import EngineOptions
from areax.service import server
from areax.service.options import Options
from areax.service.schema import FLOAT32, INT64, MESSAGES

KEY = "tml-test"
ENGINE = EngineOptions(slots=4, context=64)


def datum(tokens, **inputs):
    """(tokens, inputs); targets are the next tokens unless they are given."""
    tokens = np.asarray(tokens)
    return tokens[:-1], {"target_tokens": tokens[1:], **inputs}


def pass_body(model, seq, data, loss="cross_entropy", options=None, forward_only=False):
    """A ForwardBackwardRequest as the client makes it."""
    message = MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only)
    for name, value in (options or {}).items():
        message.loss_fn_config_v2[name].number = value
    for tokens, inputs in data:
        each = message.data.add()
        half = len(tokens) // 2
        for part in (tokens[:half], tokens[half:]):  # several chunks in a row are usual
            each.model_input.add().encoded_text.tokens = np.asarray(part, "<i4").tobytes()
        for name, x in inputs.items():
            whole = name == "target_tokens"
            tensor = each.loss_fn_inputs[name]
            tensor.dense = np.asarray(x, "<i8" if whole else "<f4").tobytes()
            tensor.dtype = INT64 if whole else FLOAT32
            tensor.shape.append(len(x))
    return message.SerializeToString()


def read_pass(content):
    """(metrics, [{name: array} of each datum]) of a ForwardBackwardOutput."""
    message = MESSAGES["ForwardBackwardOutput"].FromString(content)
    [record] = message.loss_fn_outputs
    rows = [{} for _ in range(record.num_datums)]
    for name, field in record.fields.items():
        cuts = np.frombuffer(field.offsets, "<i8")
        for row, a, b in zip(rows, cuts, cuts[1:], strict=False):
            row[name] = np.frombuffer(field.data[a:b], "<f4")
    return dict(message.metrics), rows


def read_sample(content):
    """(per sequence (tokens, logp, stop_reason), prompt's log-probabilities) of a SampleResponse."""
    message = MESSAGES["SampleResponse"].FromString(content)
    one = lambda s: (np.frombuffer(s.tokens, "<i4").tolist(), np.frombuffer(s.logprobs, "<f4"), s.stop_reason)
    return [one(s) for s in message.sequences], np.frombuffer(message.prompt_logprobs, "<f4")


class Caller:
    """Calls the routes with a key."""

    def __init__(self, http, key=KEY):
        self.http, self.headers = http, {"X-API-Key": key}

    def post(self, path, body):
        binary = isinstance(body, bytes)
        sent = {"content": body} if binary else {"json": body}
        return self.http.post(f"/api/v1/{path}", headers=self.headers, **sent)

    def get(self, path):
        return self.http.get(f"/api/v1/{path}", headers=self.headers)

    def answer(self, path, body):
        """The JSON of an answer that must be 200."""
        made = self.post(path, body)
        assert made.status_code == 200, made.text
        return made.json()

    def result(self, path, body):
        """The result of a request that is answered by a future."""
        return self.wait(self.answer(path, body)["request_id"])

    def wait(self, request_id):
        while (made := self.post("retrieve_future", {"request_id": request_id})).status_code == 408:
            pass
        assert made.status_code == 200, made.text
        return made.content if "protobuf" in made.headers["content-type"] else made.json()

    def session(self):
        return self.answer("create_session", {"tags": [], "sdk_version": "0"})["session_id"]

    def model(self, base, session=None, seq=0, rank=4, **lora):
        body = {
            "session_id": session or self.session(), "model_seq_id": seq, "base_model": str(base),
            "lora_config": {"rank": rank, "seed": 7, **lora},
        }  # fmt: skip
        return self.result("create_model", body)["model_id"]

    def train(self, model, seq, data, loss="cross_entropy", options=None, **more):
        return read_pass(self.result("forward_backward", pass_body(model, seq, data, loss, options, **more)))

    def step(self, model, seq, **adam):
        adam = {"learning_rate": 1e-2, **adam}
        return self.result("optim_step", {"model_id": model, "seq_id": seq, "adam_params": adam})


@contextlib.contextmanager
def serving(model, out, keys=(), served="", **options):
    """A `Caller` of the service of a model folder."""
    with server.serving(str(model), served or str(model), Options(str(out), **options), ENGINE, keys=keys) as app:
        with TestClient(app) as http:
            yield Caller(http)


def weights(folder):
    """The tensors of a saved adapter, by name, and its optimiser's."""
    from areax.adapters import safetensors

    found = dict(safetensors.read(folder / "adapter" / "adapter_model.safetensors"))
    moments = folder / "optimizer.safetensors"
    return found | (dict(safetensors.read(moments)) if moments.exists() else {})
