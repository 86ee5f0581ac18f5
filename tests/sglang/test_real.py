"""Pitfalls of the real SGLang that a client has to work around; each test fails once SGLang fixes its pitfall.

Omitted are those that crash the server: a token id outside the vocabulary, an empty prompt, and updates from a
truncated file, with a tensor of the wrong shape or with an unknown load_format.
"""

import asyncio
import json
import shutil
import time

import numpy as np
import pytest
import servers
from safetensors.numpy import load_file, save_file

from areax.adapters import torch
from areax.rollout import client
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.sglang import SGLang
from areax.rollout.weights import tensors

PROMPT = [5, 17, 42, 100, 61]


def checksum(real):
    return real.ok("/weights_checker", {"action": "checksum"})["per_engine_checksum"]


def label(real):
    return real.ok("/model_info")["weight_version"]


def update(real, path, version=None, **fields):
    return real.post("/update_weights_from_disk", {"model_path": str(path), "weight_version": version, **fields})


@pytest.fixture
def altered(versions, tmp_path):
    """altered(change) -> a copy of version 1 whose tensors `change` has edited."""

    def altered(change):
        shutil.copytree(versions.paths[1], tmp_path / "altered")
        (file,) = (tmp_path / "altered").glob("*.safetensors")
        tensors = dict(load_file(file))
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
        return tmp_path / "altered"

    return altered


def test_requesting_an_unloaded_adapter_loads_it_again(real, adapters):
    """So a client must never use an old name whose directory may hold something else by now."""
    name = adapters.labels[1]
    real.ok("/load_lora_adapter", {"lora_name": name, "lora_path": str(adapters.paths[1])})
    real.ok("/unload_lora_adapter", {"lora_name": name})
    listed = lambda: [card["id"] for card in real.ok("/v1/models")["data"] if card["parent"]]
    assert listed() == []
    real.generate(PROMPT, fields={"lora_path": name})
    assert listed() == [name]


def test_use_rslora_is_ignored_and_the_scale_is_alpha_over_rank(real, adapters, tmp_path):
    """Hence `write_published` folds rsLoRA's scale into alpha."""
    shutil.copytree(adapters.paths[1], tmp_path / "root")
    about = json.loads((tmp_path / "root/adapter_config.json").read_text())
    (tmp_path / "root/adapter_config.json").write_text(json.dumps(about | {"use_rslora": True}))
    answers = []
    for name, path in (("plain", adapters.paths[1]), ("root", tmp_path / "root")):
        real.ok("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        answers.append(real.generate(PROMPT, fields={"lora_path": name})["meta_info"]["output_token_logprobs"])
    np.testing.assert_allclose([row[0] for row in answers[0]], [row[0] for row in answers[1]], atol=1e-5)


def test_seeds_are_ignored_without_deterministic_inference(real):
    draw = lambda: real.generate(PROMPT, temperature=1.0, max_new_tokens=24, sampling_seed=7)["output_ids"]
    assert draw() != draw()


def test_a_scored_prompt_gets_an_output_logprob_if_others_generate(real):
    """It gets one, without a token, if it is prefilled together with generating requests; alone it gets none."""
    read, generate = {"max_new_tokens": 0}, {"max_new_tokens": 2, "ignore_eos": True}
    body = {"input_ids": [PROMPT, [*PROMPT, 7]], "return_logprob": True}
    for params, rows in (([read, generate], 1), ([read, read], 0)):
        answer = real.ok("/generate", {**body, "sampling_params": params})[0]
        assert answer["output_ids"] == [] and len(answer["meta_info"]["output_token_logprobs"]) == rows


def test_unknown_fields_of_a_body_are_ignored(real):
    assert real.generate(PROMPT, fields={"no_such_field": 1})["output_ids"] == real.generate(PROMPT)["output_ids"]


def test_ignore_eos_also_ignores_stop_token_ids(real):
    stop = real.generate(PROMPT)["output_ids"][3]
    assert len(real.generate(PROMPT, stop_token_ids=[stop], ignore_eos=False)["output_ids"]) < 8
    assert len(real.generate(PROMPT, stop_token_ids=[stop], ignore_eos=True)["output_ids"]) == 8


def test_logprobs_before_min_new_tokens_exclude_stop_tokens(real, versions):
    """They are those of the distribution renormalised without stop tokens, so not the policy's."""
    stop = real.generate(PROMPT)["output_ids"][2]
    answer = real.generate(PROMPT, max_new_tokens=5, min_new_tokens=5, stop_token_ids=[stop], ignore_eos=False)
    row_T = np.array([row[0] for row in answer["meta_info"]["output_token_logprobs"]])
    ids = answer["output_ids"]
    logp_TV = versions.logp(0, [*PROMPT, *ids])[len(PROMPT) - 1 :]
    stops = [stop, *versions.config.eos]
    kept_T = np.log1p(-np.exp(logp_TV[: len(ids), stops]).sum(-1))
    ours_T = logp_TV[np.arange(len(ids)), ids]
    np.testing.assert_allclose(row_T, ours_T - kept_T, atol=1e-4)
    assert np.abs(row_T - ours_T).max() > 1e-3


def test_an_abort_of_a_request_held_by_a_pause_is_lost(real):
    real.ok("/pause_generation", {"mode": "abort"})
    held = servers.Later(lambda: real.generate(PROMPT, fields={"rid": "held"}))
    time.sleep(0.3)
    real.ok("/abort_request", {"rid": "held"})
    real.ok("/continue_generation", {})
    assert held.result()["meta_info"]["finish_reason"]["type"] == "length"


def test_a_reused_request_id_of_a_finished_stream_is_aborted(real):
    params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    body = {"input_ids": PROMPT, "rid": "again"}
    with real.stream("/generate", {**body, "sampling_params": params}) as events:
        list(events)
    answer = real.ok("/generate", {**body, "sampling_params": {**params, "max_new_tokens": 4000}})
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


def test_new_weights_without_a_label_keep_the_old_label(real, versions):
    before = checksum(real)
    assert update(real, versions.paths[1])[0] == 200
    assert checksum(real) != before and label(real) == versions.labels[0]
    assert real.generate(PROMPT)["meta_info"]["weight_versions"][0]["version"] == versions.labels[0]


def test_weights_replaced_after_a_push_of_tensors_are_loaded_again(real, versions):
    """Tensors leave the folder that the server reports."""

    async def main():
        timeouts = client.Timeouts(heartbeat_s=0.2)
        async with client.connect([real.url], handover=versions.handover, timeouts=timeouts) as fleet:
            first = real.ok("/model_info")["model_path"]
            await push_weights(fleet, versions.paths[1], versions.labels[1], arrays=versions.params[1])
            assert real.ok("/model_info")["model_path"] == first
            await asyncio.sleep(1)
            assert fleet.counts["stale"] == 0
            assert update(real, versions.paths[2])[0] == 200  # without a label
            while not fleet.counts["recovered"]:
                await asyncio.sleep(0.1)
            return await fleet.generate(PROMPT, max_new_tokens=12, temperature=0.0, ignore_eos=True)

    done = asyncio.run(asyncio.wait_for(main(), 60))
    assert done.tokens == versions.greedy(1, PROMPT, 12) and set(done.version) == {1}


def test_an_update_with_an_unknown_tensor_reports_success(real, altered):
    path = altered(lambda tensors: tensors.update({"model.layers.0.nope.weight": np.zeros(3, np.float32)}))
    status, answer = update(real, path, "extra")
    assert status == 200 and answer["success"] and label(real) == "extra"


def test_an_update_with_missing_tensors_reports_success_and_keeps_the_old_ones(real, versions, altered):
    def drop(tensors):
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    whole = real.ok("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
    status, answer = update(real, altered(drop), "half")
    assert status == 200 and answer["success"] and label(real) == "half"
    half = real.ok("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
    assert {name.split(".")[2] for name in whole if half[name] == whole[name] and "layers" in name} == {"1"}


def test_an_update_does_not_read_config_json(real, altered):
    path = altered(lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert update(real, path, "other")[0] == 200 and label(real) == "other"


def test_an_update_during_an_in_place_pause_fails_but_takes_effect(real, versions):
    """Status 400, and new weights under the old label: hence a push pauses with retract or abort."""
    before = checksum(real)
    params = {"temperature": 1.0, "max_new_tokens": 4000, "ignore_eos": True}
    body = {"input_ids": PROMPT, "rid": "in-place", "sampling_params": params}
    with real.stream("/generate", body) as events:
        next(events)
        real.ok("/pause_generation", {"mode": "in_place"})
        status, answer = update(real, versions.paths[1], versions.labels[1])
        assert status == 400 and not answer["success"]
        assert checksum(real) != before and label(real) == versions.labels[0]
        real.ok("/continue_generation", {})
        real.ok("/abort_request", {"rid": "in-place"})
        list(events)


@pytest.mark.parametrize("kind", ["in place with a flush", "half a checkpoint", "names that it does not know"])
def test_a_push_that_leaves_wrong_weights_is_detected_and_undone(real, versions, altered, monkeypatch, kind):
    """Requests that run meanwhile are answered under the previous version, reloaded in full."""
    mode, path, handover = "retract", versions.paths[1], None
    if kind == "in place with a flush":
        mode, load = "in_place", SGLang.update_weights_from_disk
        flushing = lambda self, path, label, **_: load(self, path, label)
        monkeypatch.setattr(SGLang, "update_weights_from_disk", flushing)
    elif kind == "half a checkpoint":
        path = altered(lambda them: [them.pop(name) for name in list(them) if "layers.1." in name])
    else:
        wrong = lambda params: torch._pickled([("model.layers.0.nope.weight", torch.to_torch(params["norm"]))])
        handover = tensors.handover(lambda params: iter([(wrong(params), True)]))

    async def run():
        timeouts = client.Timeouts(push_attempts=1)
        async with client.connect([real.url], handover=handover, timeouts=timeouts) as fleet:
            await push_weights(fleet, versions.paths[0], versions.labels[0], probe=versions.probe(0))
            begun = asyncio.Event()
            look = lambda tokens: len(tokens) >= 4 and begun.set()
            ask = fleet.generate(PROMPT, max_new_tokens=100, ignore_eos=True, on_tokens=look)
            running = asyncio.create_task(ask)
            await begun.wait()
            arrays = versions.params[1] if handover else None
            with pytest.raises(RuntimeError, match="no server took version 1-"):
                await push_weights(fleet, path, versions.labels[1], mode=mode, arrays=arrays, probe=versions.probe(1))
            return await running, fleet

    done, fleet = asyncio.run(run())
    assert (done.version, fleet.counts["weights_unknown"], fleet.counts["recovered"]) == ([0] * 100, 1, 1)
    logp_TV = versions.logp(0, [*PROMPT, *done.tokens])[len(PROMPT) - 1 :]
    np.testing.assert_allclose(done.logp, [logp_TV[i, id] for i, id in enumerate(done.tokens)], atol=1e-4)


def test_a_push_closes_a_weight_update_session_left_open(real, versions):
    """A trainer that died while sending tensors does not block the next one."""
    real.ok("/begin_weight_update", {})

    async def run():
        async with client.connect([real.url], handover=versions.handover) as fleet:
            return await push_weights(
                fleet, versions.paths[1], versions.labels[1], arrays=versions.params[1], probe=versions.probe(1)
            )

    assert asyncio.run(run()).loaded == (real.url,)


def test_the_prefix_of_the_next_turn_is_cached_until_a_push(real, versions, tmp_path):
    """Prefix routing relies on it: whatever was read or generated is not read again under the same weights."""
    prompt = [int(i) for i in np.random.default_rng(0).integers(5, 250, 200)]

    async def main():
        async with client.connect([real.url]) as fleet:
            await push_weights(fleet, versions.paths[0], versions.labels[0])
            ask = lambda tokens: fleet.generate(tokens, max_new_tokens=60, ignore_eos=True)
            first = await ask(prompt)
            turn = [*prompt, *first.tokens, 1, 2, 3]
            second = await ask(turn)
            await push_weights(fleet, versions.paths[1], versions.labels[1])
            return [done.info["cached_tokens"] for done in (first, second, await ask(turn))]

    first, second, third = asyncio.run(main())
    assert first == third == 0 and 255 <= second < 263
