"""A new vision-language model for the demo: a Qwen3-VL whose tower and text model have two layers each."""

import json
from collections.abc import Sequence
from pathlib import Path

import jax

from areax import models
from areax.adapters import hf, tokenizer
from areax.adapters.data import images
from areax.core import param

TEXT = {
    "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
    "initializer_range": 0.06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5],
                        "mrope_interleaved": True},
}  # fmt: skip
PATCHES = {"patch_size": 4, "temporal_patch_size": 2}  # of pixels; 2 x 2 patches are a feature
TOWER = {
    **PATCHES, "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "spatial_merge_size": 2,
    "out_hidden_size": 96, "num_position_embeddings": 36, "deepstack_visual_indexes": [0], "initializer_range": 0.06,
}  # fmt: skip
SPECIAL = {  # config.json's names of the tokens around and of features
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
TEMPLATE = (  # as that of Qwen3-VL, without tools
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write(path: Path, words: Sequence[str], side: int, seed: int) -> None:
    """Writes a checkpoint with random weights, its tokenizer and its image processor.

    Args:
      words: tokens of the tokenizer; it has no others for text.
      side: pixels along the sides of images.
    """
    tokens = tokenizer.character("", words=("user", "assistant", *words), multiple=1)
    tokens.add_tokens([*SPECIAL.values()], special_tokens=True)
    tokens.chat_template = TEMPLATE
    ids = {name: tokens.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    source = {
        "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True,
        "text_config": {**TEXT, "model_type": "qwen3_vl_text", "vocab_size": len(tokens)}, "vision_config": TOWER,
        "eos_token_id": tokens.eos_token_id, **ids,
    }  # fmt: skip
    config = models.with_vision(models.config_from_hf(source))
    hf.save(path, config, param.init(jax.random.key(seed), models.table(config)), tokenizer=tokens)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", **PATCHES, "merge_size": TOWER["spatial_merge_size"],
        "size": {"shortest_edge": side**2, "longest_edge": side**2},
    }  # fmt: skip
    (path / images.FILE).write_text(json.dumps(processor, indent=2) + "\n")
