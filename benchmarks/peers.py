"""Helpers for the peers' sides of several cases: weights, optimisers, text of token ids, and training loops."""

import json
import os
import queue
import threading
from pathlib import Path


def causal_lm(folder: str, dtype: str = "float32"):
    """Loads the checkpoint with transformers and its fastest attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


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


def tunix_model(folder: str, mesh=None):
    """Loads the checkpoint with tunix, in fp32. Its rotary base is 1e6 whatever the config says: a default argument,
    set here."""
    import importlib

    import jax.numpy as jnp

    hf = json.loads(Path(folder, "config.json").read_text())
    family, tied = {"qwen3": ("qwen3", "use_tied_embedding"), "llama": ("llama3", "weight_tying")}[hf["model_type"]]
    model, params = (importlib.import_module(f"tunix.models.{family}.{name}") for name in ("model", "params"))
    theta = int(hf["rope_parameters"]["rope_theta"])
    model.apply_rope.__defaults__ = (theta,)
    config = model.ModelConfig(
        num_layers=hf["num_hidden_layers"], vocab_size=hf["vocab_size"], embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"], num_heads=hf["num_attention_heads"], head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"], rope_theta=theta, norm_eps=hf["rms_norm_eps"],
        **{tied: hf["tie_word_embeddings"]},
    )  # fmt: skip
    return params.create_model_from_safe_tensors(folder, config, mesh, dtype=jnp.float32)


def tunix_sampler(folder: str, vocab: int, length: int):
    """tunix's Sampler over the checkpoint with a cache of `length` positions, for text of token ids."""
    from tunix.generate.sampler import CacheConfig, Sampler

    net = tunix_model(folder)
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


class Llama:
    """A GGUF file in llama.cpp, for `count` sequences of at most `length` tokens at once; with keys and values in fp32
    if `exact`, else in its default, fp16.
    """

    def __init__(self, path: str, count: int, length: int, *, exact: bool):
        import llama_cpp

        self._api, error = llama_cpp, 4
        self._log = llama_cpp.llama_log_callback(lambda level, text, _: level == error and print(text.decode()))
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = count * length, count, count * length
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        if exact:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(count * length, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _step(self, rows, at: int):
        """Likeliest next tokens behind rows [count, n] of tokens at positions `at` and following."""
        import numpy as np

        batch, (count, n) = self._batch, rows.shape
        batch.n_tokens = count * n
        for i in range(count * n):
            row, place = divmod(i, n)
            batch.token[i], batch.pos[i] = int(rows[row, place]), at + place
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, row, place == n - 1
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp: llama_decode failed")
        logits = (self._api.llama_get_logits_ith(self._context, row * n + n - 1) for row in range(count))
        return np.array([np.ctypeslib.as_array(x, (self._vocab,)).argmax() for x in logits])

    def generate(self, rows, new: int):
        """Greedy continuations [count, new] of rows [count, length] of tokens."""
        import numpy as np

        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        made = [self._step(rows, 0)]
        for i in range(new - 1):
            made.append(self._step(made[-1][:, None], rows.shape[1] + i))
        return np.stack(made, 1)


def text(ids) -> str:
    """Token ids as text, for interfaces that accept only text."""
    return " ".join(map(str, ids))


def pausing(pause, result):
    """A callback of transformers' trainers that calls `pause` before each step, with what `result` returns, or the
    trainer's last logged value of that name."""
    from transformers import TrainerCallback

    class Pausing(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            logged = lambda: next((line[result] for line in reversed(state.log_history) if result in line), None)
            pause(result() if callable(result) else logged())

    return Pausing()


def paced_recipe(module, name: str, main, result):
    """`paced` of a recipe's `main()`, which calls the function `name` of `module` for each step. What earlier steps had
    to compute is computed before it pauses; `result` makes the result of what the function returned."""
    import jax

    step = getattr(module, name)

    def loop(pause):
        last = None

        def paused(*given, **named):
            nonlocal last
            jax.block_until_ready(jax.live_arrays())
            pause(last and result(last))
            last = step(*given, **named)
            return last

        setattr(module, name, paused)
        main()

    return paced(loop)


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
