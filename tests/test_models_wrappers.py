"""Text models within wrappers: what transformers computes, and exports that are whole again, to the bit."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import peft as their_peft
import pytest
import quantise
import tiny
import torch
import transformers
import vlm

from areax import models
from areax.adapters import cli, hf, peft, safetensors
from areax.adapters import torch as torch_dicts
from areax.adapters.commands import check
from areax.models import lora, wrappers

TEXT = dict(
    vocab_size=61, hidden_size=40, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=12, max_position_embeddings=96, initializer_range=0.2, rms_norm_eps=1e-3,
)  # fmt: skip
PLAIN = dict(TEXT, head_dim=None)  # a wrapper whose heads are always hidden_size / num_attention_heads
TOWER = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, patch_size=14)
SQUARE = dict(TOWER, image_size=28)
BLOCKS = dict(depth=1, hidden_size=16, intermediate_size=20, num_heads=2, out_hidden_size=40)
QWEN = dict(image_token_id=57, video_token_id=58, vision_start_token_id=59, vision_end_token_id=60)
AXES = lambda *sections, **more: dict(rope_type="default", rope_theta=321.0, mrope_section=list(sections), **more)
ROPE = dict(rope_type="default", rope_theta=321.0)
# Options of each wrapper; the text model's and the vision tower's are among them.
CASES: dict[str, dict] = {
    "gemma3": dict(
        text_config=dict(
            TEXT, sliding_window=5, layer_types=["full_attention", "sliding_attention"], query_pre_attn_scalar=24,
        ),
        vision_config=dict(SQUARE, model_type="siglip_vision_model"), image_token_index=57, mm_tokens_per_image=4,
    ),
    "mistral3": dict(
        text_config=dict(TEXT, model_type="mistral", sliding_window=5, rope_parameters=ROPE, eos_token_id=7),
        vision_config=dict(SQUARE, model_type="pixtral", head_dim=8), image_token_index=57, tie_word_embeddings=False,
    ),
    "qwen3_5": dict(
        text_config=dict(
            TEXT, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=10, linear_value_head_dim=14,
            layer_types=["full_attention", "linear_attention"], eos_token_id=7,
            rope_parameters=AXES(1, 1, 1, partial_rotary_factor=0.5),
        ),
        vision_config=dict(BLOCKS, num_position_embeddings=16), tie_word_embeddings=True, **QWEN,
    ),
    "qwen3_5_moe": dict(
        text_config=dict(
            TEXT, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=10, linear_value_head_dim=14,
            layer_types=["full_attention", "linear_attention"],
            rope_parameters=AXES(1, 1, 1, partial_rotary_factor=0.5),
            num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28,
        ),
        vision_config=dict(BLOCKS, num_position_embeddings=16), tie_word_embeddings=False, **QWEN,
    ),
    "gemma4": dict(
        text_config=dict(
            TEXT, sliding_window=5, layer_types=["sliding_attention", "full_attention"], global_head_dim=12,
            hidden_size_per_layer_input=6, vocab_size_per_layer_input=61, num_kv_shared_layers=0,
        ),
        vision_config=dict(TOWER, num_key_value_heads=2, head_dim=8, position_embedding_size=16), image_token_id=57,
    ),
    "llama4": dict(
        text_config=dict(
            TEXT, intermediate_size_mlp=44, num_local_experts=3, attention_chunk_size=6, no_rope_layers=[1, 0],
            rope_parameters=ROPE,
        ),
        vision_config=dict(
            SQUARE, intermediate_size=64, vision_output_dim=20, projector_input_dim=20, projector_output_dim=20
        ),
        image_token_index=57,
    ),
    "mistral3 ministral3": dict(
        text_config=dict(
            TEXT, model_type="ministral3", rope_parameters=dict(
                rope_type="yarn", rope_theta=321.0, factor=4.0, original_max_position_embeddings=8, beta_fast=4.0,
                beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3,
            ),
        ),
        vision_config=dict(SQUARE, model_type="pixtral", head_dim=8), image_token_index=57, tie_word_embeddings=True,
    ),
    "internvl": dict(
        text_config=dict(TEXT, model_type="qwen3", rope_parameters=ROPE),
        vision_config=dict(TOWER, image_size=[28, 28], patch_size=[14, 14]), image_token_id=57,
    ),
    "llava": dict(
        text_config=dict(TEXT, model_type="llama", rope_parameters=ROPE),
        vision_config=dict(SQUARE, model_type="clip_vision_model", projection_dim=16), image_token_index=57,
    ),
    "qwen3_vl": dict(
        text_config=dict(TEXT, rope_parameters=AXES(2, 2, 2)),
        vision_config=dict(BLOCKS, num_position_embeddings=16, deepstack_visual_indexes=[0]), **QWEN,
    ),
    "qwen3_vl_moe": dict(
        text_config=dict(
            TEXT, rope_parameters=AXES(2, 2, 2), num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24
        ),
        vision_config=dict(BLOCKS, num_position_embeddings=16, deepstack_visual_indexes=[0]), **QWEN,
    ),
    "qwen2_5_vl": dict(
        text_config=dict(PLAIN, rope_parameters=AXES(2, 2, 1)), vision_config=dict(BLOCKS, fullatt_block_indexes=[0]),
        tie_word_embeddings=True, **QWEN,
    ),
}  # fmt: skip
COMMON = ("gemma3", "mistral3", "qwen3_5")
EACH = [pytest.param(name, marks=[pytest.mark.mesh] * (name not in COMMON)) for name in CASES]


def reference(name):
    """A model of transformers with weights that all matter."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name.split()[0], **CASES[name])
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape)
    return model


@pytest.fixture(scope="module", params=EACH)
def case(request, tmp_path_factory):
    """(name, model of transformers, its files, config, params)."""
    path, model = tmp_path_factory.mktemp("wrapper"), reference(request.param)
    vlm.save(model, path)
    (path / "preprocessor_config.json").write_text('{"image_processor_type": "any"}')
    return request.param, model, path, *hf.load(path)


def theirs(model, token_BT):
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(token_BT), attention_mask=None, use_cache=False).logits.numpy()


def assert_same_logits(model, config, params):
    token_BT = np.random.default_rng(0).integers(0, 57, (2, 19))
    ours = np.asarray(jax.jit(models.forward, static_argnames="config")(params, token_BT, config=config))
    wanted = theirs(model, token_BT)
    assert wanted.std() > 0.3 and np.abs(ours - wanted).max() < 1e-4 * max(1, np.abs(wanted).max())


def equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def contents(path):
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


def bits(path):
    return {name: (x.dtype, x.shape, safetensors.digest(x)) for name, x in safetensors.read(path).items()}


def add(path, **tensors):
    """Adds tensors to a checkpoint; "__" stands for "."."""
    held = {name: np.array(x) for name, x in safetensors.read(path).items()}
    held |= {name.replace("__", "."): x for name, x in tensors.items()}
    (path / "manifest.json").unlink(missing_ok=True)
    for file in path.glob("model*.safetensors*"):
        file.unlink()
    safetensors.write(path, held, held.values())


@pytest.mark.sweep
def test_text_is_what_transformers_computes(case):
    _, model, _, config, params = case
    assert_same_logits(model, config, params)


@pytest.mark.sweep
def test_the_names_in_transformers_module_are_read_too(case):
    _, model, _, config, params = case
    again, same = torch_dicts.from_state_dict(models.config_from_hf(model.config.to_dict()), model.state_dict())
    assert equal(params, same) and again.tied == config.tied
    assert again.prefix == wrappers.in_module(config).prefix
    one_by_one = lambda names: sorted(name for name in names if ".experts." not in name)  # or all of a layer in one
    ours = torch_dicts.to_state_dict(again, same).keys() | {*again.rest.names}
    assert one_by_one(ours) == one_by_one(model.state_dict())


@pytest.mark.sweep
def test_an_export_is_the_wrapper_with_other_weights_in_its_text_model(case, tmp_path):
    name, model, path, config, params = case
    trained = jax.tree.map(lambda x: x * 1.25, params)
    hf.save(tmp_path / "out", config, trained)
    before, after = bits(path), bits(tmp_path / "out")
    assert before.keys() == after.keys() == json.loads((tmp_path / "out/manifest.json").read_bytes())["tensors"].keys()
    assert {key for key in before if before[key] == after[key]} == {*config.rest.names}
    assert any("vis" in key for key in config.rest.names)
    assert (tmp_path / "out/preprocessor_config.json").read_bytes() == (path / "preprocessor_config.json").read_bytes()

    auto = transformers.AutoModelForImageTextToText
    loaded, found = auto.from_pretrained(tmp_path / "out", output_loading_info=True, attn_implementation="eager")
    assert type(loaded) is type(model) and not any(found.values())
    assert_same_logits(loaded.eval(), config, trained)
    own = {key: x for key, x in model.state_dict().items() if key in _others(model, config)}
    assert own and all(torch.equal(x, loaded.state_dict()[key]) for key, x in own.items())
    written, source = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "out", path))
    assert written["vision_config"] == source["vision_config"] and written["architectures"] == source["architectures"]
    assert written["text_config"]["model_type"] == source["text_config"]["model_type"]
    assert written.keys() - source.keys() <= {"torch_dtype"}

    hf.save(tmp_path / "again", *hf.load(tmp_path / "out"))
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def _others(model, config):
    """Names in transformers' module of what the text model does not use."""
    text = wrappers.in_module(config).prefix
    return {key for key in model.state_dict() if not key.startswith(text) and "lm_head" not in key}


@pytest.mark.sweep
def test_converting_and_checking(case, tmp_path, capsys):
    name, _, path, config, _ = case
    cli.main(["convert", str(path), str(tmp_path / "low"), "--dtype", "bfloat16"])
    low, before = safetensors.read(tmp_path / "low"), safetensors.read(path)
    others = set(config.rest.names)
    assert {x.dtype for key, x in low.items() if key in others} == {np.dtype(np.float32)}
    assert np.dtype(ml_dtypes.bfloat16) in {x.dtype for key, x in low.items() if key not in others}
    assert json.loads((tmp_path / "low/config.json").read_text())["text_config"]["dtype"] == "bfloat16"
    assert all(np.array_equal(low[key], before[key]) for key in others)
    report = check.check(path, "torch", gradients=name == "mistral3")
    assert report["ok"], report


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers the old way
@pytest.mark.parametrize("name", ["mistral3", "qwen3_vl"])
def test_adapters_are_those_of_peft_on_the_wrapper(name, tmp_path):
    model = reference(name)
    model.save_pretrained(tmp_path / "base")
    config, params = hf.load(tmp_path / "base")
    spec = lora.Lora(rank=2, targets=("q", "v", "down"))
    adapters = tiny.weights(lora.table(models.table(config), spec), 0.3)
    peft.save(tmp_path / "adapter", config, adapters, spec)
    assert_same_logits(
        their_peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval(),
        config, lora.merge(params, adapters, spec),
    )  # fmt: skip
    again, same = peft.load(tmp_path / "adapter", config)
    assert again == spec and equal(adapters, same)


MTP = {
    "mtp.fc.weight": np.ones((4, 8), ml_dtypes.bfloat16), "mtp.layers.0.mlp.experts.gate_up_proj": np.ones((2, 6, 4)),
    "mtp.layers.0.self_attn.q_proj.weight": np.arange(6, dtype=np.float32),
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_text"])
def test_what_predicts_further_tokens_survives_an_export(family, tmp_path):
    if family == "qwen3_5":
        reference("qwen3_5").save_pretrained(tmp_path)
    else:
        text = dict(CASES["qwen3_5"]["text_config"], model_type=family)
        config = models.config_from_hf(text)
        hf.save(tmp_path, config, tiny.weights(models.table(config), 0.2))
    add(tmp_path, **MTP)
    config, params = hf.load(tmp_path)
    hf.save(tmp_path / "out", config, params)
    assert bits(tmp_path / "out") == bits(tmp_path) and MTP.keys() <= bits(tmp_path / "out").keys()
    add(tmp_path, mtq__fc__weight=np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"unexpected mtq.fc.weight$"):
        hf.load(tmp_path)


def test_mtp_of_a_family_without_it_is_unexpected(tmp_path):
    path = tiny.model(tmp_path / "model")
    add(path, mtp__fc__weight=np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"unexpected mtp.fc.weight$"):
        hf.load(path)


def test_quantised_tensors_that_are_passed_on_are_dequantised(tmp_path):
    """The export's config.json says nothing of quantised weights, so that no tensor may be one."""
    source = tiny.wrapped(
        tiny.model(tmp_path / "source"), {"vision_tower.up_proj.weight": np.ones((9, 20), np.float32)}
    )
    coded, plain = quantise.in_fp8(source, tmp_path / "coded", lambda name: "up_proj" in name, (8, 16))
    config, params = hf.load(coded, dtype=None)
    assert config.rest.names == ("vision_tower.up_proj.weight",)
    hf.save(tmp_path / "out", config, params)
    assert bits(tmp_path / "out").keys() == bits(plain).keys()
    name = "vision_tower.up_proj.weight"
    assert bits(tmp_path / "out")[name] == bits(plain)[name]
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()
    assert equal(hf.load(coded, "bfloat16")[1], hf.load(tmp_path / "out", "bfloat16")[1])


@pytest.fixture
def small(tmp_path):
    return tiny.wrapped(tiny.model(tmp_path / "small"))


def test_what_is_passed_on_must_still_be_there(small, tmp_path):
    config, params = hf.load(small)
    copy = shutil.copytree(small, tmp_path / "copy")
    shutil.rmtree(small)
    names = r"multi_modal_projector.x|vision_tower.cls"
    with pytest.raises(ValueError, match=rf"save: ({names}) and 1 more must be copied from .*{small}.* base$"):
        hf.save(tmp_path / "out", config, params)
    assert not (tmp_path / "out").exists()
    hf.save(tmp_path / "out", config, params, base=copy)
    assert bits(tmp_path / "out") == bits(copy)
    tiny.model(small)  # another model is there now
    with pytest.raises(ValueError, match=rf"save: ({names}) and 1 more must be copied from {small}"):
        hf.save(tmp_path / "again", config, params)


def test_a_config_without_weights_is_no_wrapper_to_export(small, tmp_path):
    config = hf.read_config(small)
    params = tiny.weights(models.table(config), 0.2)
    with pytest.raises(ValueError, match=r"save: a wrapper needs the tensors of its other parts.*models.text_only"):
        hf.save(tmp_path / "out", config, params)
    hf.save(tmp_path / "out", models.text_only(config), params)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "qwen3"
    assert equal(hf.load(tmp_path / "out")[1], params)


def test_damage_to_what_is_passed_on_is_found_by_its_manifest(small, tmp_path, capsys):
    hf.save(tmp_path / "out", *hf.load(small))
    for file in (tmp_path / "out").glob("model-*.safetensors"):
        if "vision_tower.cls" in safetensors.read(file):
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    hf.load(tmp_path / "out")  # does not read it
    with pytest.raises(ValueError, match=r"(vision_tower.cls|multi_modal_projector.x) does not match manifest.json"):
        hf.verify(tmp_path / "out")
    assert cli.main(["check", str(tmp_path / "out")]) == 2
    assert "does not match manifest.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tower_is_not_held_in_memory(tmp_path):
    """Reading maps a file, so that the process's memory has what was read until it is released."""

    def peak(work):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        before = Path("/proc/self/status").read_text()
        result = work()
        kilobytes = [
            int(re.search(r"VmHWM:\s+(\d+)", text)[1]) for text in (before, Path("/proc/self/status").read_text())
        ]
        return (kilobytes[1] - kilobytes[0]) * 1024, result

    size = 256 << 20
    tower = {f"vision_tower.{i}": np.broadcast_to(np.float32(i), (size // 4 // 16,)) for i in range(16)}
    path = tiny.wrapped(tiny.model(tmp_path / "big"), tower)
    loading, (config, params) = peak(lambda: hf.load(path))
    saving, _ = peak(lambda: hf.save(tmp_path / "out", config, params))
    assert loading < size / 4 and saving < size / 4
    assert hf.verify(tmp_path / "out")


def test_a_reward_model_is_the_text_model_alone(small, tmp_path):
    """Nothing reads images with a score."""
    config, params = hf.load(small, init_missing=("score",))
    assert config.score_head and config.rest is None
    hf.save(tmp_path / "out", config, params)
    assert not any("vision" in name for name in bits(tmp_path / "out"))
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("qwen3", ["Qwen3ForSequenceClassification"])
    theirs, found = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(found.values()) and theirs.config.num_labels == 1


def outer(**changes):
    text = dict(TEXT, model_type="mistral", sliding_window=None)
    return {"model_type": "mistral3", "text_config": text, "eos_token_id": [3, 4], **changes}


@pytest.mark.parametrize("whole, inner, tied", [
    (True, False, True), (False, True, False), (None, False, False), (None, True, True), (None, None, True),
])  # fmt: skip
def test_tying_is_what_the_whole_says_then_the_text_model_then_the_class(whole, inner, tied):
    hf_config = outer()
    hf_config |= {} if whole is None else {"tie_word_embeddings": whole}
    hf_config["text_config"] |= {} if inner is None else {"tie_word_embeddings": inner}
    config = models.config_from_hf(hf_config)
    assert config.tied == tied and config.eos == (3, 4)
    assert models.config_to_hf(config)["tie_word_embeddings"] == tied


def test_files_decide_about_tying_where_nothing_is_said(tmp_path):
    """As in transformers, whose default of Mistral 3 is not what Mistral's checkpoints are."""
    model = reference("mistral3")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    source = json.loads(path.read_text())
    del source["tie_word_embeddings"], source["text_config"]["tie_word_embeddings"]
    path.write_text(json.dumps(source))
    config, params = hf.load(tmp_path)
    assert not config.tied
    assert_same_logits(model, config, params)


@pytest.mark.parametrize(
    "name",
    [name for name, one in wrappers.WRAPPERS.items() if one.texts and {*one.texts.values()} <= {*models.FAMILIES}],
)
def test_what_a_wrapper_leaves_out_means_what_it_means_to_transformers(name):
    """Of those whose text model is of one kind; each says in text_config how its layers are."""
    [text] = list(wrappers.WRAPPERS[name].texts)[:1]
    least = dict(
        vocab_size=61, hidden_size=48, intermediate_size=40, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, model_type=text,
    )  # fmt: skip
    least |= dict(head_dim=None) if name == "qwen2_5_vl" else {}
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8)
    least |= experts if name in ("qwen3_5_moe", "qwen3_vl_moe") else {}
    theirs = transformers.AutoConfig.for_model(name, text_config=dict(least)).to_dict()
    ignored = dict(source="", eos=(), prefix="")
    ours, theirs = (
        dataclasses.replace(models.config_from_hf(one), **ignored)
        for one in ({"model_type": name, "text_config": least}, theirs)
    )
    assert ours == theirs


PUBLISHED = {  # as checkpoints on the hub are; sizes are smaller
    "gemma3": dict(
        eos_token_id=[1, 106],
        text_config=dict(
            hidden_size=64, intermediate_size=40, num_hidden_layers=7, model_type="gemma3_text", sliding_window=1024,
            rope_scaling={"factor": 8.0, "rope_type": "linear"},
        ),
    ),
    "qwen2_5_vl": dict(
        attention_dropout=0.0, bos_token_id=3, eos_token_id=5, hidden_act="silu", hidden_size=64, intermediate_size=40,
        max_position_embeddings=128000, max_window_layers=70, num_attention_heads=4, num_hidden_layers=2,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1e6, sliding_window=32768, tie_word_embeddings=True,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}, use_sliding_window=False, vocab_size=61,
        vision_config=dict(depth=1, hidden_size=16),
    ),
    "qwen3_vl_moe": dict(
        tie_word_embeddings=False,
        text_config=dict(
            attention_bias=False, attention_dropout=0.0, bos_token_id=3, decoder_sparse_step=1, dtype="bfloat16",
            eos_token_id=5, head_dim=16, hidden_act="silu", hidden_size=64, intermediate_size=40, mlp_only_layers=[],
            max_position_embeddings=262144, model_type="qwen3_vl_moe_text", moe_intermediate_size=24,
            norm_topk_prob=True, num_attention_heads=4, num_experts=6, num_experts_per_tok=2, num_hidden_layers=2,
            num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=5e6, vocab_size=61,
            rope_scaling={"mrope_interleaved": True, "mrope_section": [2, 3, 3], "rope_type": "default"},
        ),
    ),
    "qwen3_vl": dict(
        tie_word_embeddings=True,
        text_config=dict(
            attention_bias=False, attention_dropout=0.0, bos_token_id=3, dtype="bfloat16", eos_token_id=5, head_dim=16,
            hidden_act="silu", hidden_size=64, intermediate_size=40, max_position_embeddings=262144,
            model_type="qwen3_vl_text", num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2,
            rms_norm_eps=1e-6, rope_theta=5e6, tie_word_embeddings=True, vocab_size=61,
            rope_scaling={"mrope_interleaved": True, "mrope_section": [2, 3, 3], "rope_type": "default"},
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_mean_what_they_mean_to_transformers(name):
    """Ours, what transformers makes of them, and what we write of them."""

    def theirs_of(hf_config):
        options = json.loads(json.dumps(hf_config))  # it changes what it is given
        return transformers.AutoConfig.for_model(**options).to_dict()

    published = PUBLISHED[name] | {"model_type": name, "architectures": ["Any"]}
    ours, theirs = models.config_from_hf(published), theirs_of(published)
    written = models.config_to_hf(ours)
    plain = lambda config: dataclasses.replace(config, source="")
    assert plain(ours) == plain(models.config_from_hf(theirs)) == plain(models.config_from_hf(written))
    assert models.config_to_hf(models.config_from_hf(written)) == written
    assert theirs_of(written)["text_config"]["rope_parameters"] == theirs["text_config"]["rope_parameters"]


@pytest.mark.parametrize("source, words", [
    (outer(text_config=None), "mistral3 needs text_config, the text model's options, got None"),
    (outer(text_config={"model_type": "llama"}), "text_config of mistral3 must be mistral or ministral3, got 'llama'"),
    ({"model_type": "llava", "text_config": {"model_type": "opt"}}, "model_type must be one of .*, got 'opt'"),
    (outer(text_config={"model_type": ["mistral"]}), r"must be mistral or ministral3, got \['mistral'\]"),
    ({"model_type": "llava", "text_config": {}}, "text_config of llava must be one of a text model, got None"),
    ({"model_type": "glm4v", "text_config": {}}, "model_type must be one of .*gemma3, .*, got 'glm4v'"),
    (outer(quantization_config={"quant_method": "gptq"}), "must not be quantised, got quantization_config .*'gptq'.*"),
    ({**TEXT, "model_type": "llama", "quantization_config": {"quant_method": "awq"}}, "'awq'.*rounded and packed"),
])  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(source, words):
    with pytest.raises(ValueError, match=words):
        models.config_from_hf(source)


def test_tensors_of_no_part_are_unexpected(small):
    add(small, vision_towers__x=np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"unexpected vision_towers.x$"):
        hf.load(small)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path):
    path = tiny.model(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin: weights must be in safetensors, got a pickle") as caught:
        hf.load(path)
    command = (
        str(caught.value)
        .partition('python -c "')[2]
        .partition('"')[0]
        .replace("'converted'", repr(str(tmp_path / "new")))
    )
    exec(compile(command, "the way out", "exec"), {})
    assert equal(hf.load(tmp_path / "new")[1], torch_dicts.from_state_dict(hf.read_config(path), model.state_dict())[1])
