"""The layer for multi-token prediction: read from checkpoints of both kinds, and computed as transformers' layers."""

import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from test_rollout_engine_programs_decode import CASES as DECODED
from test_rollout_engine_programs_decode import TINY

from areax import models
from areax.adapters import hf, safetensors
from areax.core import param
from areax.models import layer, mtp
from areax.models.attention import backends

# Latent vectors, plain attention, and delta nets beside attention with a gate; behind the model's layers, or apart.
CASES = {
    "deepseek_v3": DECODED["deepseek_v3"] | {"num_nextn_predict_layers": 1},
    "glm4_moe": DECODED["glm4_moe"] | {"num_nextn_predict_layers": 1},
    "qwen3_next": DECODED["qwen3_next"],
    "qwen3_5_text": DECODED["qwen3_5_text"],
}
APART = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}


@functools.cache
def model(case, vocab=TINY["vocab_size"]):
    """(config, the model's weights, those of the layer)."""
    config = models.config_from_hf({"model_type": case} | TINY | CASES[case] | {"vocab_size": vocab})
    return config, tiny.weights(models.table(config), 0.16), tiny.weights(mtp.table(config), 0.16, seed=1)


def write(path, config, params, w, tokens=None):
    """A checkpoint with the layer, under the names of published ones; and its tensors."""
    hf.save(path, config, params, tokenizer=tokens)
    held = {name: np.array(x) for name, x in safetensors.read(path).items()}
    specs, arrays = hf.tensors_of(mtp.table(config), config.prefix, w, "float32")
    held |= dict(zip(specs, arrays, strict=True))
    if config.family in mtp.BEHIND:
        behind = f"model.layers.{config.layers}."
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        held |= {f"{behind}{name}.weight": held[f"{of}.weight"] for name, of in copies.items()}
    for file in (path / "manifest.json", *path.glob("model*.safetensors*")):
        file.unlink()
    safetensors.write(path, held, held.values())
    return held


class Reference:
    """The model and the layer by transformers: the layer as a model of one layer, which is given what it reads."""

    def __init__(self, path, config, held):
        import torch
        import transformers

        self.torch, self.eps, self.offset = torch, config.norm_eps, config.norm_offset
        load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, attn_implementation="eager")
        self.model = load(path).eval()
        apart = config.family in mtp.APART
        start = "mtp." if apart else f"model.layers.{config.layers}."
        own = lambda name: held[f"{start}{APART[name] if apart else name}.weight"]
        self.enorm, self.hnorm, self.project = (torch.tensor(own(name)) for name in ("enorm", "hnorm", "eh_proj"))
        block = "mtp.layers.0." if apart else start
        alone = {f"model.layers.0.{name[len(block) :]}": x for name, x in held.items() if name.startswith(block)}
        alone |= {name: held[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        alone["model.norm.weight"] = own("shared_head.norm")
        source = json.loads((path / "config.json").read_text())
        source |= {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "first_k_dense_replace": 0}
        if "layer_types" in source:
            source["layer_types"] = ["full_attention"]
        source |= {"mlp_only_layers": [], "full_attention_interval": 1} if apart else {}
        (path / "layer").mkdir()
        (path / "layer" / "config.json").write_text(json.dumps(source))
        safetensors.write(path / "layer", alone, alone.values())
        self.layer = load(path / "layer").eval()

    def _norm(self, x, weight):
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (weight + self.offset)

    def inputs(self, hidden, tokens):
        """What the layer reads of hidden states and the tokens after them."""
        embedded = self._norm(self.model.model.embed_tokens(self.torch.tensor(tokens)), self.enorm)
        return self.torch.cat([embedded, self._norm(hidden, self.hnorm)], -1) @ self.project.T

    def run(self, inputs):
        """(hidden states, logits) of the layer for one sequence."""
        with self.torch.no_grad():
            hidden = self.layer.model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state
            return hidden[0], self.layer.lm_head(hidden)[0]

    def hidden(self, tokens):
        """The model's, behind its last norm."""
        with self.torch.no_grad():
            return self.model.model(self.torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    def drafts(self, tokens, count):
        """The likeliest `count` tokens behind a sequence, one after the other."""
        with self.torch.no_grad():
            inputs, made = self.inputs(self.hidden(tokens)[:-1], tokens[1:]), []
            while True:
                hidden, logits = self.run(inputs)
                made.append(int(logits[-1].argmax()))
                if len(made) == count:
                    return made
                inputs = self.torch.cat([inputs, self.inputs(hidden[-1:], made[-1:])])


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_next", pytest.param("glm4_moe", marks=pytest.mark.mesh)])
def test_logits_are_those_of_transformers_layers(case, tmp_path):
    """Of a checkpoint's tensors, as they are read."""
    config, params, w = model(case)
    reference = Reference(tmp_path, config, write(tmp_path, config, params, w))
    config, params = hf.load(tmp_path)
    read = hf.mapped_mtp(tmp_path, config)["stacks"][0]
    assert all(np.array_equal(read[name][0], x[0]) for name, x in w["stacks"][0].items())
    tokens = np.random.default_rng(0).integers(0, config.vocab, 33).tolist()
    hidden = reference.hidden(tokens)[:-1]
    _, wanted = reference.run(reference.inputs(hidden, tokens[1:]))

    position_BT = jnp.arange(len(hidden))[None]
    record = mtp.record(config)
    attend = lambda q, k, v, sinks=None, latent=None: backends.causal(
        q, k, v, jnp.ones_like(position_BT), position_BT, sinks, backend="auto", pattern=record.pattern
    )

    @jax.jit
    def logits(params, read, hidden_BTD, token_BT):
        mixer = layer.mixers((record,), position_BT)(record, attend)
        return mtp.forward(params, read, hidden_BTD, token_BT, mixer, config) @ models.head(params).T

    read = {name: jnp.asarray(x[0]) for name, x in read.items()}
    made = logits(params, read, jnp.asarray(hidden.numpy())[None], jnp.asarray([tokens[1:]]))
    np.testing.assert_allclose(made[0], wanted.numpy(), atol=1e-4)
    assert np.std(wanted.numpy()) > 0.3


def test_experts_of_a_layer_in_one_tensor_are_read(tmp_path):
    """As in Qwen3.5's checkpoints."""
    config = models.config_from_hf({"model_type": "qwen3_5_moe_text"} | TINY | DECODED["qwen3_5_moe_text"])
    w = tiny.weights(mtp.table(config), 0.16)
    held = write(tmp_path, config, tiny.weights(models.table(config), 0.16), w)
    experts = "mtp.layers.0.mlp.experts."
    each = lambda name: np.stack([held.pop(f"{experts}{e}.{name}_proj.weight") for e in range(config.experts)])
    held[f"{experts}gate_up_proj"] = np.concatenate([each("gate"), each("up")], 1)
    held[f"{experts}down_proj"] = each("down")
    for file in tmp_path.glob("model*.safetensors*"):
        file.unlink()
    safetensors.write(tmp_path, held, held.values())
    read = hf.mapped_mtp(tmp_path, hf.read_config(tmp_path))["stacks"][0]
    assert all(np.array_equal(read[name][0], x[0]) for name, x in w["stacks"][0].items())


def test_a_checkpoint_without_the_layer_or_with_half_of_it(tmp_path):
    config, params, w = model("glm4_moe")
    hf.save(tmp_path / "none", config, params)
    assert hf.mapped_mtp(tmp_path / "none", hf.read_config(tmp_path / "none")) is None
    held = write(tmp_path / "half", config, params, w)
    del held["model.layers.2.enorm.weight"]
    held["model.layers.2.eh_proj.weight"] = held["model.layers.2.eh_proj.weight"].astype(ml_dtypes.bfloat16)
    for file in (tmp_path / "half").glob("model*.safetensors*"):
        file.unlink()
    safetensors.write(tmp_path / "half", held, held.values())
    with pytest.raises(ValueError, match=r"prediction need all of its layer, got missing model.layers.2.enorm"):
        hf.mapped_mtp(tmp_path / "half", config)
    plain = models.config_from_hf(tiny.HF | {"vocab_size": 20})
    assert not mtp.known(plain) and not mtp.stated(plain) and hf.mapped_mtp(tmp_path, plain) is None


def test_config_json_says_whether_there_is_one():
    says = lambda case, **more: mtp.stated(models.config_from_hf({"model_type": case} | TINY | DECODED[case] | more))
    assert not says("glm4_moe") and says("glm4_moe", num_nextn_predict_layers=1)
    assert says("qwen3_next") and not says("qwen3_5_text", mtp_num_hidden_layers=0)


def test_the_published_size():
    """Of DeepSeek-V3: 11.5 billion weights beside the shared embeddings and head."""
    from test_adapters_commands_plan import PUBLISHED

    config = models.config_from_hf(PUBLISHED["DeepSeek-V3"][2])
    assert round(param.count(mtp.table(config)) / 1e9, 1) in (11.5, 11.6)
