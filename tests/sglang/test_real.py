"""What the real server does that a client has to know: each test shows a trap, and fails when SGLang closes it.

Left out are those that end the whole server: a token id outside the vocabulary, an empty prompt, and updates from a
file cut short, with a misshapen tensor or with an unknown load_format.
"""

import json
import shutil
import time

import numpy as np
import pytest
import servers
from safetensors.numpy import load_file, save_file

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


def test_a_seed_is_dropped_without_deterministic_inference(real):
    draw = lambda: real.generate(PROMPT, temperature=1.0, max_new_tokens=24, sampling_seed=7)["output_ids"]
    assert draw() != draw()


def test_unknown_fields_of_a_body_are_dropped(real):
    assert real.generate(PROMPT, fields={"no_such_field": 1})["output_ids"] == real.generate(PROMPT)["output_ids"]


def test_ignore_eos_ignores_the_callers_stop_ids_too(real):
    stop = real.generate(PROMPT)["output_ids"][3]
    assert len(real.generate(PROMPT, stop_token_ids=[stop], ignore_eos=False)["output_ids"]) < 8
    assert len(real.generate(PROMPT, stop_token_ids=[stop], ignore_eos=True)["output_ids"]) == 8


def test_logprobs_before_the_least_length_leave_out_the_stop_ids(real, versions):
    """There they are those of the distribution without stop tokens, so not the policy's."""
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


def test_an_abort_is_lost_on_a_request_that_a_pause_holds(real):
    real.ok("/pause_generation", {"mode": "abort"})
    held = servers.Later(lambda: real.generate(PROMPT, fields={"rid": "held"}))
    time.sleep(0.3)
    real.ok("/abort_request", {"rid": "held"})
    real.ok("/continue_generation", {})
    assert held.result()["meta_info"]["finish_reason"]["type"] == "length"


def test_the_name_of_a_stream_is_aborted_two_seconds_after_its_end(real):
    params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    body = {"input_ids": PROMPT, "rid": "again"}
    with real.stream("/generate", {**body, "sampling_params": params}) as events:
        list(events)
    answer = real.ok("/generate", {**body, "sampling_params": {**params, "max_new_tokens": 4000}})
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


def test_new_weights_without_a_label_keep_the_old_one(real, versions):
    before = checksum(real)
    assert update(real, versions.paths[1])[0] == 200
    assert checksum(real) != before and label(real) == versions.labels[0]
    assert real.generate(PROMPT)["meta_info"]["weight_versions"][0]["version"] == versions.labels[0]


def test_an_unknown_tensor_is_a_success(real, altered):
    path = altered(lambda tensors: tensors.update({"model.layers.0.nope.weight": np.zeros(3, np.float32)}))
    status, answer = update(real, path, "extra")
    assert status == 200 and answer["success"] and label(real) == "extra"


def test_missing_tensors_are_a_success_and_half_of_the_old_weights_stay(real, versions, altered):
    def drop(tensors):
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    whole = real.ok("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
    status, answer = update(real, altered(drop), "half")
    assert status == 200 and answer["success"] and label(real) == "half"
    half = real.ok("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
    assert {name.split(".")[2] for name in whole if half[name] == whole[name] and "layers" in name} == {"1"}


def test_another_models_config_is_not_read(real, altered):
    path = altered(lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert update(real, path, "other")[0] == 200 and label(real) == "other"


def test_an_update_under_an_in_place_pause_fails_and_happens(real, versions):
    """400, and the label of old weights on new ones: a push pauses with retract or abort."""
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
