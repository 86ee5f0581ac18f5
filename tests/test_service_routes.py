"""The service over HTTP: training, sampling, saving, repeated and refused requests, keys."""

import json
import random
import re

import numpy as np
import pytest
import tinker_calls as calls
import tiny

from areax.adapters import tokenizer
from areax.service import saves, worker

RNG = np.random.default_rng(0)
DATA = [calls.datum(RNG.integers(0, 10, n), weights=RNG.uniform(0.5, 1.5, n - 1)) for n in (6, 11, 8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def service(folder, out):
    with calls.serving(folder, out, save_every=3) as caller:
        yield caller


def saved(service, out, model, seq, name="last", **more):
    """The tensors of a model's state, by saving it."""
    body = {"model_id": model, "seq_id": seq, "path": name, "overwrite": False, **more}
    return calls.weights(saves.folder(out, service.result("save_weights", body)["path"]))


def sample(service, sampler, seq, prompt, num_samples=1, reads=False, **params):
    body = {
        "sampling_session_id": sampler, "seq_id": seq, "num_samples": num_samples, "prompt_logprobs": reads,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(map(int, prompt))}]}, "sampling_params": params,
    }  # fmt: skip
    made = service.answer("asample", body)
    assert len(made["sample_sequence_ids"]) == num_samples
    return calls.read_sample(service.wait(made["request_id"]))


def for_sampler(service, model, seq):
    body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
    return service.result("save_weights_for_sampler", body)["sampling_session_id"]


def test_a_loop_lowers_the_loss_and_samples_have_the_log_probabilities_of_a_forward_pass(service, folder):
    model = service.model(folder)
    info = service.answer("get_info", {"model_id": model})
    assert info["lora_rank"] == 4 and info["model_data"]["tokenizer_id"] == str(folder)
    losses, seq = [], 1
    for _ in range(4):
        metrics, rows = service.train(model, seq, DATA)
        losses.append(metrics["loss:sum"])
        assert service.step(model, seq + 1)["metrics"]["skipped"] == 0
        seq += 2
    want = -sum(np.sum(x["weights"] * row["logprobs"]) for (_, x), row in zip(DATA, rows, strict=True))
    np.testing.assert_allclose(losses[-1], want, rtol=1e-5)
    assert losses[-1] < 0.8 * losses[0]

    prompt, sampler = DATA[0][0][:3], for_sampler(service, model, seq)
    found, read = sample(service, sampler, 0, prompt, 3, reads=True, max_tokens=6, seed=5)
    assert len({tuple(tokens) for tokens, *_ in found}) > 1
    assert sample(service, sampler, 1, prompt, 3, reads=True, max_tokens=6, seed=5)[0][0][0] == found[0][0]
    whole = [calls.datum([*prompt, *tokens]) for tokens, *_ in found]
    _, rows = service.train(model, seq + 1, whole, forward_only=True)
    for (tokens, logp, _), row in zip(found, rows, strict=True):
        np.testing.assert_allclose(logp, row["logprobs"][-len(tokens) :], atol=1e-4)
    np.testing.assert_allclose(read[1:], rows[0]["logprobs"][:2], atol=1e-4)
    assert np.isnan(read[0]) and len(read) == 3


def test_weights_by_name_are_sampled_from_in_another_session(service, folder):
    model = service.model(folder)
    service.train(model, 1, DATA)
    service.step(model, 2)
    path = service.result("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "named"})["path"]
    body = {"session_id": service.session(), "sampling_session_seq_id": 0, "model_path": path}
    sampler = service.answer("create_sampling_session", body)["sampling_session_id"]
    assert service.get(f"samplers/{sampler}").json()["model_path"] == path
    [(tokens, logp, stop)], _ = sample(service, sampler, 0, [1, 2], max_tokens=4, temperature=0.0, stop=[])
    assert stop == 1 and len(tokens) == 4
    [(own, *_)], _ = sample(service, for_sampler(service, model, 4), 0, [1, 2], max_tokens=4, temperature=0.0, stop=[])
    assert own == tokens
    text = tokenizer.load(folder).decode(tokens[:1])
    [(cut, _, stop)], _ = sample(service, sampler, 1, [1, 2], max_tokens=4, temperature=0.0, stop=text)
    assert cut == tokens[:1] and stop == 0
    assert service.answer("weights_info", {"tinker_path": path})["lora_rank"] == 4


def test_a_request_that_is_sent_again_is_the_same_request(service, folder, out):
    models = [service.model(folder) for _ in range(2)]
    for model, times in zip(models, (1, 3), strict=True):
        for seq, path, body in (
            (1, "forward_backward", calls.pass_body(model, 1, DATA)),
            (2, "optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}),
        ):
            ids = {service.answer(path, body)["request_id"] for _ in range(times)}
            assert ids == {f"{model}:{seq}"}
        service.wait(f"{model}:2")
    once, thrice = (saved(service, out, model, 3) for model in models)
    assert all(np.array_equal(once[name], thrice[name]) for name in once)
    made = service.post("optim_step", {"model_id": models[0], "seq_id": 1, "adam_params": {}})
    assert made.status_code == 400 and "is a forward_backward" in made.json()["detail"]


def test_chunks_of_a_call_may_arrive_in_any_order(service, folder, out):
    models = [service.model(folder) for _ in range(2)]
    for model, order in zip(models, ((1, 2, 3), (3, 2, 1)), strict=True):
        for seq in order:
            service.answer("forward_backward", calls.pass_body(model, seq, [DATA[seq - 1]]))
        service.step(model, 4)
    one, other = (saved(service, out, model, 5) for model in models)
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_saved_state_goes_on_as_the_model_did(service, folder, out, optimizer):
    def go_on(model, seq):
        service.train(model, seq, DATA, "cross_entropy")
        service.step(model, seq + 1, weight_decay=0.1)
        return saved(service, out, model, seq + 2, "end")

    first = service.model(folder)
    service.train(first, 1, DATA[:2])
    service.step(first, 2)
    path = service.result("save_weights", {"model_id": first, "seq_id": 3, "path": "half"})["path"]
    want = go_on(first, 4)
    body = {"session_id": service.session(), "model_seq_id": 3, "path": path, "optimizer": optimizer}
    second = service.result("load_weights", body)
    assert second["model_id"] == f"{body['session_id']}:train:3"
    got = go_on(second["model_id"], 1)
    assert all(np.array_equal(want[name], got[name]) for name in want) == optimizer
    third = service.model(folder, seed=9)
    service.result("load_weights", {"model_id": third, "seq_id": 1, "path": path, "optimizer": optimizer})
    assert all(np.array_equal(x, got[name]) for name, x in go_on(third, 2).items())


REFUSED = [
    ("loss_fn must be one of .* not published", dict(loss="stable_reinforce")),
    ("loss_fn_config: dro needs beta", dict(loss="dro", data=[calls.datum([1, 2], logprobs=[0], advantages=[0])])),
    ("loss_fn_config: ppo has clip_low_threshold", dict(loss="ppo", options={"clip": 1.0})),
    ("must have target_tokens, logprobs, advantages, got no logprobs", dict(loss="ppo")),
    ("data must have at least one datum", dict(data=[])),
    ("token ids from 0 to 31", dict(data=[calls.datum([1, 99])])),
    ("from 1 to 64 tokens, got 69", dict(data=[calls.datum([1] * 70)])),
    ("weights must be finite", dict(data=[calls.datum([1, 2], weights=[np.nan])])),
    ("weights must have one number for each of the 1 tokens", dict(data=[calls.datum([1, 2], weights=[1, 2])])),
]
# null is what clients send for NaN and infinity; without an epsilon a parameter without a gradient would become NaN
ADAM_REFUSED = [
    ("learning_rate", -1), ("beta1", 1.0), ("learning_rate", "x"), ("learning_rate", None), ("eps", 0.0),
    ("eps", 1e-40),
]  # fmt: skip


def test_a_refused_request_says_why_and_uses_up_its_seq_id(service, folder):
    model, seq = service.model(folder), 1
    for words, changes in REFUSED:
        made = service.post("forward_backward", calls.pass_body(model, seq, **{"data": DATA, **changes}))
        assert made.status_code == 400
        assert re.search(words, made.json()["detail"]), made.json()
        seq += 1
    for name, value in ADAM_REFUSED:
        made = service.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {name: value}})
        assert made.status_code == 400 and f"{name} must be a number" in made.json()["detail"]
        seq += 1
    metrics, _ = service.train(model, seq, DATA)  # the next one runs
    assert metrics["loss:sum"] > 0


def test_what_fails_as_it_runs_is_told_with_the_result(service, folder):
    model = service.model(folder)
    for seq, overwrite in ((1, False), (2, True), (3, False)):
        body = {"model_id": model, "seq_id": seq, "path": "twice", "overwrite": overwrite}
        made = service.result("save_weights", body)
        assert ("error" in made) == (seq == 3)
    assert made["category"] == "user" and "exists" in made["error"]


def test_a_gradient_that_is_not_finite_is_skipped_and_told_in_json(service, folder):
    model = service.model(folder)
    service.train(model, 1, [calls.datum([1, 2, 3], weights=[3e38, 3e38])])  # overflows
    id = service.answer("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}})
    told = service.post("retrieve_future", id).text
    assert json.loads(told, parse_constant=pytest.fail)["metrics"]["skipped"] == 1


def test_the_least_epsilon_leaves_what_has_no_gradient(service, folder):
    model = service.model(folder)  # B is 0, so A has no gradient
    service.train(model, 1, DATA)
    assert service.step(model, 2, eps=worker.EPS)["metrics"]["update_ratio"] > 0
    assert np.isfinite(service.train(model, 3, DATA)[0]["loss:sum"])


def test_weights_that_could_not_be_loaded_are_not_trained(service, folder, out):
    first, session = service.model(folder), service.session()
    path = service.result("save_weights", {"model_id": first, "seq_id": 1, "path": "gone"})["path"]
    (saves.folder(out, path) / "optimizer.json").write_text("{}")
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    made = service.result("load_weights", body)
    assert made["category"] == "user" and "does not match optimizer.json" in made["error"]
    made = service.result("forward_backward", calls.pass_body(f"{session}:train:0", 1, DATA))
    assert "its weights could not be loaded" in made["error"]


def test_a_step_is_made_though_there_is_no_room_for_the_state(service, folder, out, monkeypatch):
    model, written = service.model(folder), saves.write

    def full(path, *more, **options):
        if path.name == "6":
            raise OSError(28, "No space left on device")
        written(path, *more, **options)

    monkeypatch.setattr(saves, "write", full)
    for seq in range(1, 9, 2):
        service.train(model, seq, DATA)
        assert service.step(model, seq + 1)["metrics"]["skipped"] == 0
    assert [path.name for path in saves.state_folder(out, model, 0).parent.iterdir()] == ["8"]


def test_names_models_and_options_that_are_not_served_are_refused(service, folder):
    session = service.session()
    create = {"session_id": session, "model_seq_id": 0, "base_model": str(folder), "lora_config": {"rank": 4}}
    for changes, status in (
        ({"base_model": "other"}, 400), ({"lora_config": {"rank": 33}}, 400), ({"session_id": "none"}, 404),
        ({"optimizer_config": {"type": "dimuon"}}, 400),
        ({"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False}}, 400),
    ):  # fmt: skip
        assert service.post("create_model", {**create, **changes}).status_code == status
    model = service.model(folder)
    for seq, changes in enumerate(({"path": "../x"}, {"path": ".hidden"}, {"path": "a/b"}, {"kind": "inflight"}), 1):
        body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": 1, **changes}
        assert service.post("save_weights_for_sampler", body).status_code == 400
    body = {"session_id": session, "model_seq_id": 1, "path": "tinker://a:train:0/weights/x", "optimizer": False}
    assert service.post("load_weights", body).status_code == 404
    for path in ("get_info", "optim_step", "retrieve_future"):
        body = {"model_id": "none", "seq_id": 1, "request_id": "none:1"}
        assert service.post(path, body).status_code == 404


def test_a_key_sees_only_its_own(folder, tmp_path):
    with calls.serving(folder, tmp_path, keys=("tml-a", "tml-b")) as caller:
        assert caller.post("create_session", {}).status_code == 401
        a, b = (calls.Caller(caller.http, key) for key in ("tml-a", "tml-b"))
        model = a.model(folder)
        path = a.result("save_weights", {"model_id": model, "seq_id": 1, "path": "x"})["path"]
        session, others = model.partition(":")[0], b.session()
        for route, body in (
            ("get_info", {"model_id": model}),
            ("optim_step", {"model_id": model, "seq_id": 2}),
            ("forward_backward", calls.pass_body(model, 2, DATA)),
            ("retrieve_future", {"request_id": f"{model}:1"}),
            ("session_heartbeat", {"session_id": session}),
            (f"sessions/{session}/finish", {}),
            ("weights_info", {"tinker_path": path}),
            ("load_weights", {"session_id": others, "model_seq_id": 0, "path": path}),
            ("create_sampling_session", {"session_id": others, "sampling_session_seq_id": 0, "model_path": path}),
        ):
            assert b.post(route, body).status_code == 404, route
        assert a.post(f"sessions/{session}/finish", {}).status_code == 204
        assert a.post("session_heartbeat", {"session_id": session}).status_code == 410
        assert a.post("get_info", {"model_id": model}).status_code == 404
        assert a.answer("weights_info", {"tinker_path": path})["lora_rank"] == 4  # what is saved stays


def test_malformed_bodies_are_refused(service, folder):
    """Bytes and fields of valid bodies changed at random: never an error of the server."""
    rng, model, session = random.Random(0), service.model(folder), service.session()
    sampler = for_sampler(service, model, 1)
    junk = [None, -1, 0, 2**70, 1e300, "", "x" * 300, "\0", [], [[]], {}, {"a": 1}, True, ["a", 1]]
    bodies = {
        "create_model": {"session_id": session, "model_seq_id": 0, "base_model": str(folder), "lora_config": {}},
        "load_weights": {"session_id": session, "model_seq_id": 1, "path": "tinker://a/weights/b", "optimizer": True},
        "optim_step": {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-3, "beta1": 0.9}},
        "save_weights": {"model_id": model, "seq_id": 3, "path": "x", "overwrite": True},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 4, "path": "x", "sampling_session_seq_id": 1},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "base_model": str(folder)},
        "asample": {
            "sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "topk_prompt_logprobs": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "prompt_logprobs": True,
            "sampling_params": {"max_tokens": 1, "stop": [1], "seed": 1, "top_k": 2, "temperature": 1.0},
        },
        "retrieve_future": {"request_id": f"{model}:0"}, "cancel_future": {"request_id": f"{model}:0"},
        "get_info": {"model_id": model}, "weights_info": {"tinker_path": "tinker://a/weights/b"},
        "create_session": {"sdk_version": "1"}, "session_heartbeat": {"session_id": session},
    }  # fmt: skip

    def changed(value):
        if isinstance(value, dict) and value and rng.random() < 0.8:
            name = rng.choice([*value])
            return {**value, name: changed(value[name])}
        if isinstance(value, list) and value and rng.random() < 0.5:
            return [changed(value[0])]
        return rng.choice(junk)

    data = [calls.datum([1, 2, 3], logprobs=[0, 0], advantages=[1, 1], weights=[1, 1])]
    valid = calls.pass_body(model, 9, data, "ppo", {"clip_low_threshold": 0.5})
    for _ in range(150):
        path = rng.choice([*bodies])
        assert service.post(path, changed(bodies[path])).status_code < 500
        mutated = bytearray(valid)
        for _ in range(rng.randrange(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        assert service.post("forward_backward", bytes(mutated[: rng.randrange(len(mutated))])).status_code < 500
        assert service.post("forward_backward", bytes(mutated)).status_code < 500
    assert service.post("optim_step", b"{").status_code == 400
    assert service.get("healthz").status_code == 200
