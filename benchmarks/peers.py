"""Helpers for the peers' sides of several cases: weights, optimisers, text of token ids, and training loops."""

import json
import queue
import threading
from pathlib import Path


def causal_lm(folder: str):
    """Loads the checkpoint with transformers, in fp32 with its fastest attention."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def torch_adamw(net, *, lr, b1, b2, eps, weight_decay):
    """torch's fused AdamW."""
    import torch

    return torch.optim.AdamW(
        net.parameters(), lr=lr, betas=(b1, b2), eps=eps, weight_decay=weight_decay, fused=True
    )  # fmt: skip


def optax_adamw(adam: dict, clip: float):
    """optax's AdamW after clipping by the global norm."""
    import optax

    adam = dict(adam)
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(adam.pop("lr"), **adam))


def tunix_qwen3(folder: str, mesh=None):
    """Loads the checkpoint with tunix, in fp32; its rotary base is always 1e6, whatever the config says."""
    import jax.numpy as jnp
    from tunix.models.qwen3 import model, params

    hf = json.loads(Path(folder, "config.json").read_text())
    config = model.ModelConfig(
        num_layers=hf["num_hidden_layers"], vocab_size=hf["vocab_size"], embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"], num_heads=hf["num_attention_heads"], head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"], rope_theta=1_000_000, norm_eps=hf["rms_norm_eps"],
        use_tied_embedding=hf["tie_word_embeddings"],
    )  # fmt: skip
    return params.create_model_from_safe_tensors(folder, config, mesh, dtype=jnp.float32)


def tunix_sampler(folder: str, vocab: int, length: int):
    """tunix's Sampler over the checkpoint with a cache of `length` positions, for text of token ids."""
    from tunix.generate.sampler import CacheConfig, Sampler

    net = tunix_qwen3(folder)
    c = net.config
    return Sampler(net, Numbers(vocab), CacheConfig(length, c.num_layers, c.num_kv_heads, c.head_dim))


class Numbers:
    """A tokenizer with tunix's interface for text of token ids: "17 4 230". Padding and end are ids that no model with
    `vocab` tokens can sample."""

    def __init__(self, vocab: int):
        self.vocab = vocab

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids) -> str:
        return text(ids)

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return self.vocab

    def pad_id(self) -> int:
        return self.vocab + 1


def number_tokenizer(vocab: int):
    """`Numbers` as a transformers tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words | {"</s>": vocab, "<pad>": vocab + 1}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def text(ids) -> str:
    """Token ids as text, for interfaces that accept only text."""
    return " ".join(map(str, ids))


class Ended(Exception):
    """Raised in a paced loop when no further step is wanted."""


def paced(loop):
    """Runs a library's training loop step by step: returns a function that lets it run one step and returns the result.

    `loop(pause)` runs in a thread and calls `pause(result)` before each step, with the result of the previous one. The
    function's `close` ends the loop.
    """
    go, came = queue.Queue(), queue.Queue()

    def pause(result=None):
        came.put(result)
        if not go.get():
            raise Ended

    def run():
        try:
            loop(pause)
            came.put(RuntimeError("the training loop ended before it was closed"))
        except Ended:
            pass
        except BaseException as problem:  # re-raised in the caller
            came.put(problem)

    def answer():
        result = came.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def once():
        go.put(True)
        return answer()

    def close():
        go.put(False)
        thread.join()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    answer()  # wait until it is about to run the first step
    once.close = close
    return once
