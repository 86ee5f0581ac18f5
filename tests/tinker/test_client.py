"""The unmodified client `tinker` trains, samples, saves and loads over a real socket."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

TEXT = [1, 2, 10, 3, 4, 5, 6]


def datum(tokens, **inputs):
    inputs = {"weights": [1.0] * (len(tokens) - 1), **inputs}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def ratio_datum(tokens, logprobs, advantages, **more):
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages, **more},
    )
    return datum


def trained(client, steps, **config):
    model = client.create_lora_training_client(base_model="tiny", rank=4, seed=3, **config)
    losses = []
    for _ in range(steps):
        passed = model.forward_backward([datum(TEXT)], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=2e-2))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return model, losses


def loss_of(model):
    return model.forward([datum(TEXT)], "cross_entropy").result().metrics["loss:sum"]


def test_what_the_server_has(client):
    [model] = client.get_server_capabilities().supported_models
    assert model.model_name == "tiny"


def test_supervised_training_lowers_the_loss_and_the_weights_are_sampled(client):
    model, losses = trained(client, 20)
    assert losses[-1] < 0.2 * losses[0]
    info = model.get_info()
    assert info.lora_rank == 4 and info.is_lora
    sampler = model.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=len(TEXT) - 1, temperature=0.0, stop=[])
    made = sampler.sample(types.ModelInput.from_ints(TEXT[:1]), num_samples=1, sampling_params=params).result()
    assert made.sequences[0].tokens == TEXT[1:]
    tokens = model.get_tokenizer()
    assert tokens.decode(tokens.encode("1+2")).replace(" ", "") == "1+2"


def test_passes_return_log_probabilities_of_every_target(client):
    model, _ = trained(client, 1)
    out = model.forward([datum(TEXT), datum(TEXT[:4])], "cross_entropy").result()
    logp = [np.asarray(each["logprobs"].data) for each in out.loss_fn_outputs]
    assert [len(x) for x in logp] == [6, 3]
    np.testing.assert_allclose(logp[0][:3], logp[1], atol=1e-5)
    np.testing.assert_allclose(out.metrics["loss:sum"], -sum(x.sum() for x in logp), rtol=1e-5)
    np.testing.assert_allclose(out.loss_fn_outputs[0]["elementwise_loss"].data, -logp[0], rtol=1e-5)


def test_a_sampler_and_the_trainer_agree(client):
    model, _ = trained(client, 3)
    sampler = model.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(TEXT[:3])
    params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=1, stop=[])
    made = sampler.sample(prompt, num_samples=4, sampling_params=params).result()
    again = sampler.sample(prompt, num_samples=4, sampling_params=params).result()
    assert [s.tokens for s in made.sequences] == [s.tokens for s in again.sequences]
    data = [datum([*TEXT[:3], *s.tokens]) for s in made.sequences]
    out = model.forward(data, "cross_entropy").result()
    for sequence, row in zip(made.sequences, out.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(sequence.logprobs, np.asarray(row["logprobs"].data)[2:], atol=1e-4)
    read = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
    own = model.forward([datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert read[0] is None or math.isnan(read[0])
    np.testing.assert_allclose(read[1:], own, atol=1e-4)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_policy_losses(client, loss):
    model, _ = trained(client, 1)
    before = np.asarray(model.forward([datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    A = [0.0, 0.0, 1.0, 1.0, -1.0, 0.5]
    q = (before - 0.05).tolist()
    config = {"beta": 0.1} if loss == "dro" else None
    out = model.forward_backward([ratio_datum(TEXT, q, A)], loss, loss_fn_config=config).result()
    r = np.exp(np.asarray(before) - q)
    want = {
        "importance_sampling": -np.sum(r * A), "ppo": -np.sum(np.minimum(r * A, np.clip(r, 0.8, 1.2) * A)),
        "cispo": -np.sum(np.clip(r, 0, 4) * before * A), "dro": -np.sum(before * A - 0.05 * (before - q) ** 2),
    }[loss]  # fmt: skip
    np.testing.assert_allclose(out.metrics["loss:sum"], want, rtol=1e-3)
    model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    after = np.asarray(model.forward([datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    assert np.sum((after - before) * A) > 0


def test_a_loss_of_ones_own_in_two_passes(client):
    model, _ = trained(client, 1)

    def loss(data, logprobs):
        total = torch.stack([torch.sum(x**2) for x in logprobs]).sum()
        return total, {"squares": float(total)}

    before = loss_of(model)
    out = model.forward_backward_custom([datum(TEXT)], loss).result()
    assert out.metrics
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert loss_of(model) < before


def test_a_saved_state_goes_on(client):
    model, _ = trained(client, 3)
    path = model.save_state("half").result().path
    assert path == f"tinker://{model.model_id}/weights/half"

    def go_on(model):
        model.forward_backward([datum(TEXT)], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        return loss_of(model)

    here = loss_of(model)
    want = go_on(model)
    resumed = client.create_training_client_from_state_with_optimizer(path)
    assert loss_of(resumed) == here and go_on(resumed) == want
    fresh = client.create_training_client_from_state(path)
    assert loss_of(fresh) == here and go_on(fresh) != want
    loaded = client.create_lora_training_client(base_model="tiny", rank=4)
    loaded.load_state(path).result()
    assert loss_of(loaded) == here
    saved = model.save_weights_for_sampler("named").result().path
    sampler = client.create_sampling_client(model_path=saved)
    params = types.SamplingParams(max_tokens=2, temperature=0.0, stop=[])
    assert sampler.sample(types.ModelInput.from_ints([1]), 1, params).result().sequences[0].tokens


def test_what_is_saved_is_listed_and_deleted(client):
    model, _ = trained(client, 1)
    paths = [model.save_state("a", ttl_seconds=600).result().path, model.save_weights_for_sampler("b").result().path]
    rest = client.create_rest_client()
    assert rest.get_weights_info_by_tinker_path(paths[0]).result().lora_rank == 4
    listed = lambda: [each.tinker_path for each in rest.list_checkpoints(model.model_id).result().checkpoints]
    assert listed() == paths
    rest.delete_checkpoint_from_tinker_path(paths[1]).result()
    assert listed() == paths[:1]
    with pytest.raises(tinker.NotFoundError):
        params = types.SamplingParams(max_tokens=1)
        client.create_sampling_client(model_path=paths[1]).sample(types.ModelInput.from_ints([1]), 1, params).result()


def test_refusals_are_errors_of_the_client(client):
    with pytest.raises(tinker.BadRequestError, match="base_model must be tiny"):
        client.create_lora_training_client(base_model="other", rank=4).get_info()
    model, _ = trained(client, 1)
    with pytest.raises(tinker.BadRequestError, match="token ids from 0"):
        model.forward_backward([datum([1, 2, 500])], "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match="logprobs"):
        model.forward_backward([datum(TEXT)], "ppo").result()
    assert loss_of(model) > 0  # the client goes on with the next seq_id
    model.save_state("once").result()
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        model.save_state("once").result()


def test_more_data_than_a_chunk(client):
    model = client.create_lora_training_client(base_model="tiny", rank=4, seed=3)
    out = model.forward([datum(TEXT)] * 1100, "cross_entropy").result()  # of at most 1,024 each, sent side by side
    assert len(out.loss_fn_outputs) == 1100
    np.testing.assert_allclose(out.metrics["loss:sum"], 1100 * loss_of(model), rtol=1e-4)


def test_the_loop_of_the_page_runs_as_shown(server, capsys):
    page = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text()
    [loop] = re.findall(r"```python\n(.*?)```", page, re.S)
    assert "http://127.0.0.1:8000" in loop and "range(20)" in loop
    exec(loop.replace("http://127.0.0.1:8000", server.url).replace("range(20)", "range(2)"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["0", "reward"], ["1", "reward"]]
    assert lines[-1].endswith("/weights/sums")
