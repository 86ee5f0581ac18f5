"""Small vision-language models of transformers, and sequences with images and videos of odd sizes for them."""

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import PIL.Image
import safetensors.torch
import torch
import transformers

from areax.adapters import tokenizer
from areax.models.vision import Media

IMAGE, VIDEO, START, END = 57, 58, 59, 60
TEXT = dict(
    vocab_size=62, hidden_size=40, intermediate_size=36, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=12, max_position_embeddings=96, initializer_range=0.2, rms_norm_eps=1e-2,
)  # fmt: skip
BLOCKS = dict(
    hidden_size=48, intermediate_size=28, num_heads=6, out_hidden_size=40, patch_size=2, initializer_range=0.2,
    spatial_merge_size=2,
)  # fmt: skip
IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
AXES = lambda *sections, **more: dict(rope_type="default", rope_theta=321.0, mrope_section=list(sections), **more)
HYBRID = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=10, linear_value_head_dim=14,
    layer_types=["full_attention", "linear_attention", "full_attention"],
)  # fmt: skip
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
CASES: dict[str, dict] = {
    "qwen2_5_vl": dict(
        text_config=dict(TEXT, head_dim=None, rope_parameters=AXES(2, 1, 2)), tie_word_embeddings=True,
        # Windows of 4 patches.
        vision_config=dict(BLOCKS, depth=4, window_size=8, fullatt_block_indexes=[1, 3], tokens_per_second=3), **IDS,
    ),
    "qwen3_vl": dict(
        text_config=dict(TEXT, rope_parameters=AXES(3, 2, 1)),
        vision_config=dict(BLOCKS, depth=4, num_position_embeddings=25, deepstack_visual_indexes=[0, 2]), **IDS,
    ),
    "qwen3_vl_moe": dict(
        # An MLP in the first layer: its stack is not that of the others.
        text_config=dict(TEXT, **EXPERTS, mlp_only_layers=[0], rope_parameters=AXES(1, 2, 3)),
        vision_config=dict(BLOCKS, depth=3, num_position_embeddings=16, deepstack_visual_indexes=[1, 2]), **IDS,
    ),
    "qwen3_5": dict(
        text_config=dict(TEXT, **HYBRID, rope_parameters=AXES(1, 1, 1, partial_rotary_factor=0.5)),
        vision_config=dict(BLOCKS, depth=2, num_position_embeddings=16), tie_word_embeddings=False, **IDS,
    ),
    "qwen3_5_moe": dict(
        text_config=dict(
            TEXT, **HYBRID, **EXPERTS, shared_expert_intermediate_size=28,
            rope_parameters=AXES(1, 1, 1, partial_rotary_factor=0.5),
        ),
        vision_config=dict(BLOCKS, depth=2, num_position_embeddings=16), tie_word_embeddings=True, **IDS,
    ),
}  # fmt: skip


def reference(name: str, patch: int = 2, **text):
    """A model of transformers with weights that all matter.

    Args:
      patch: pixels of a patch's side.
      text: changes of the text model's config.
    """
    torch.manual_seed(0)
    case = CASES[name] | {"text_config": CASES[name]["text_config"] | text}
    if patch != 2:
        case["vision_config"] = case["vision_config"] | {"patch_size": patch, "window_size": 4 * patch}
    config = transformers.AutoConfig.for_model(name, **case)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn(weight.shape)
    return model


def save(model, path) -> None:
    """Writes a model as checkpoints on the hub are; transformers writes experts as it reads them, or the other way
    round."""
    model.save_pretrained(path)
    if model.config.model_type == "qwen3_vl_moe":
        [file] = path.glob("*.safetensors")
        turn = lambda name, x: x.transpose(1, 2).contiguous() if ".experts." in name else x
        held = {name: turn(name, x) for name, x in safetensors.torch.load_file(file).items()}
        safetensors.torch.save_file(held, file, {"format": "pt"})


def media(grid, seed: int, seconds: float = 1.0) -> Media:
    """An image or video of random pixels; patches are 2 frames of 2 x 2 pixels of 3 channels."""
    return Media(np.random.default_rng(seed).normal(size=(np.prod(grid), 24)).astype(np.float32), grid, seconds)


def sequences(name: str) -> list[tuple[np.ndarray, list[Media]]]:
    """(tokens, media) of sequences: two images, text alone, one narrow image at the start, a video and an image."""
    rng = np.random.default_rng(0)
    text = lambda n: [*rng.integers(0, IMAGE, n)]
    wide, small, narrow, film, last = (
        media(grid, i, 0.7) for i, grid in enumerate([(1, 6, 10), (1, 4, 6), (1, 2, 14), (2, 4, 6), (1, 6, 6)])
    )
    count = lambda one: int(np.prod(one.grid)) // 4
    picture = lambda one: [START, *[IMAGE] * count(one), END]
    if name == "qwen2_5_vl":
        frames = [START, *[VIDEO] * count(film), END]
    else:  # frames are apart
        frames = [token for _ in range(2) for token in (*text(2), START, *[VIDEO] * (count(film) // 2), END)]
    found = [
        ([*text(3), *picture(wide), *text(2), *picture(small), *text(4)], [wide, small]),
        (text(9), []),
        ([*picture(narrow), *text(5)], [narrow]),
        ([*text(2), *frames, *text(3), *picture(last), *text(2)], [film, last]),
    ]
    return [(np.array(tokens, np.int32), seen) for tokens, seen in found]


def inputs(tokens, seen) -> dict:
    """A sequence as arguments of transformers' models."""
    kinds = np.where(tokens == IMAGE, 1, np.where(tokens == VIDEO, 2, 0))
    given = {"input_ids": torch.tensor(tokens[None].astype(np.int64)), "mm_token_type_ids": torch.tensor(kinds[None])}
    held: dict[str, list[Media]] = {"image": [], "video": []}
    for one in seen:
        held["image" if one.grid[0] == 1 else "video"].append(one)
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if held[kind]:
            given[pixels] = torch.tensor(np.concatenate([one.patches for one in held[kind]]))
            given[f"{kind}_grid_thw"] = torch.tensor([one.grid for one in held[kind]])
    if held["video"]:
        given["second_per_grid_ts"] = torch.tensor([one.seconds for one in held["video"]])
    return given


def logits(model, tokens, seen):
    """Those of transformers for one sequence, [n, V]."""
    given = inputs(tokens, seen)
    if "qwen2_5" not in model.config.model_type:
        given.pop("second_per_grid_ts", None)
    code, exact = sys.modules[type(model).__module__], contextlib.nullcontext()
    if hasattr(code, "torch_chunk_gated_delta_rule"):  # chunks are a hundred times less exact than token by token
        exact = mock.patch.object(code, "torch_chunk_gated_delta_rule", code.torch_recurrent_gated_delta_rule)
    with exact:
        return model(**given, attention_mask=None, use_cache=False).logits[0]


ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz .,?!:=+-<>/'"  # 49 characters: the image token is number 57
TEMPLATE = (  # as that of Qwen2.5-VL, without tools
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def folder(path: Path, name: str = "qwen2_5_vl", patch: int = 2, **text) -> Path:
    """Writes a tiny vision-language checkpoint as users have it: weights, tokenizer, chat template, image processor.

    Images become 1 to 9 features, of 2 x 2 patches each; `patch` and `text` as in `reference`.
    """
    tokens = tokenizer.character(ALPHABET, multiple=1)
    tokens.add_tokens(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"], special_tokens=True)
    assert tokens.convert_tokens_to_ids("<|image_pad|>") == IMAGE
    tokens.chat_template = TEMPLATE
    model = reference(name, patch, **text)
    for config in (model.config, model.config.text_config, model.generation_config):
        config.bos_token_id, config.eos_token_id = None, tokens.eos_token_id
    model.save_pretrained(path)
    tokenizer.save(tokens, path)
    kind = "Qwen2VLImageProcessor"
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (6 * patch) ** 2}
    sizes = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **sizes}))
    return path


def png(width: int = 9, height: int = 7, seed: int = 0) -> bytes:
    """An image file of random pixels."""
    pixels, file = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8), io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
