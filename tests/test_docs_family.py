"""docs/add-a-family.md, followed to the letter: the model family in its file equals transformers."""

import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from areax import models
from areax.adapters import hf
from areax.parallel import mesh
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.request import Request, Sampling

GUIDE = Path(__file__).parents[1] / "docs" / "add-a-family.md"
SIZES = dict(
    vocab_size=66, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3, attention_bias=True, mlp_bias=True, max_position_embeddings=64,
    eos_token_id=None, pad_token_id=None,
)  # fmt: skip
T = 19


@pytest.fixture
def family(monkeypatch, tmp_path):
    """Registers the guide's file as a family by its entry in the dictionary."""
    [text] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    path = tmp_path / "arcee.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("areax.models.arcee", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(models.FAMILIES, "arcee", module)


def reference():
    torch.manual_seed(0)
    model = transformers.ArceeForCausalLM(transformers.ArceeConfig(**SIZES)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.4 * torch.randn(weight.shape)
    return model


@pytest.mark.docs
def test_the_family_of_the_guide_equals_transformers(family, tmp_path):
    model = reference()
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    token = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, T))
    logits = model(input_ids=torch.from_numpy(token), use_cache=False).logits
    assert logits.std() >= 1
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.from_numpy(token)[:, 1:].flatten()).backward()

    def loss(params):
        logits_BTV = models.forward(params, token, config=config)
        logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp_BTV, token[:, 1:, None], -1)), logits_BTV

    gradient, got = jax.jit(jax.grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(got, logits.detach().numpy(), atol=1e-4)
    ours = dict(zip(*hf.to_tensors(config, gradient, "float32"), strict=True))
    wanted = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    assert ours.keys() == wanted.keys()
    for name, g in wanted.items():
        assert np.abs(ours[name] - g).max() <= 1e-4 * np.abs(g).max(), name

    hf.save(tmp_path / "ours", config, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))

    # decoding and meshes, which the guide says work without further code
    sampling = Sampling(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    engine = Engine(config, params, slots=1, context=32)
    made = [
        t for progress in engine.generate([Request("0", tuple(token[0].tolist()), sampling)]) for t in progress.tokens
    ]
    assert made == model.generate(torch.from_numpy(token[:1]), max_new_tokens=8, do_sample=False)[0, T:].tolist()
    on = mesh.make(mesh.Layout(fsdp=2, cp=1, tp=2), jax.devices()[:4])
    _, spread = hf.load(tmp_path / "theirs", mesh=on)
    with jax.set_mesh(on):
        there = jax.jit(lambda p: models.forward(p, token, config=config))(spread)
    np.testing.assert_allclose(there, got, atol=1e-5)


def test_the_page_of_models_lists_every_family():
    page = (GUIDE.parent / "models.md").read_text().partition("\n## ")[0]
    listed = [name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(models.FAMILIES)
