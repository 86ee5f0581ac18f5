"""Greedy generation of 128 tokens (R: 64) for each of 16 prompts of 64 tokens, without early stopping; in fp32, but for
models whose names say otherwise.
"""

from pathlib import Path

import peers
import sizes

UNIT, PROMPT, SLOTS = "tokens/s", 64, 16
OF_R = {"R": ("transformers", "tunix", "llama_cpp"), "R-bf16": ("transformers", "llama_cpp"), "R-int8": ("llama_cpp",)}
PEERS = {"M": ("transformers", "tunix"), "S": ("transformers", "tunix")} | OF_R


def case(count: int):
    """(work, ours, transformers, tunix, llama_cpp) for `count` prompts, the functions that `run.py` looks for."""
    rows = lambda folder, model: sizes.tokens(model, folder, count, PROMPT)
    new = lambda model: 64 if model in OF_R else 128

    def result(tokens, model):
        """Tokens to compare; in bf16 and int8, where ties decide, their number."""
        return tokens if model not in OF_R or model == "R" else len(tokens)

    def work(model):
        # All tokens but the last of each sequence pass through the model once.
        return count * new(model), count * sizes.flops(model, [PROMPT + new(model) - 1], backward=False)

    def ours(folder, model):
        """Returns a function that generates once and returns the new tokens."""
        from areax.adapters import hf
        from areax.rollout.engine.engine import Engine
        from areax.rollout.engine.request import Request, Sampling

        config, params = hf.load(folder, "bfloat16" if model == "R-bf16" else "float32")
        weights = "int8" if model == "R-int8" else "auto"
        engine = Engine(config, params, slots=SLOTS, context=256, weights=weights)
        sampling = Sampling(temperature=0.0, max_new_tokens=new(model), ignore_eos=True)
        prompts = [tuple(row.tolist()) for row in rows(folder, model)]

        def once():
            requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
            return result([token for done in engine.generate(requests) for token in done.tokens], model)

        return once

    def transformers(folder, model):
        import torch

        net = peers.causal_lm(folder, "bfloat16" if model == "R-bf16" else "float32").eval()
        token = torch.from_numpy(rows(folder, model))
        more = dict(attention_mask=torch.ones_like(token), do_sample=False, eos_token_id=None, pad_token_id=0)

        @torch.inference_mode()
        def once():
            made = net.generate(token, **more, max_new_tokens=new(model), min_new_tokens=new(model))
            return result(made[:, PROMPT:].flatten().tolist(), model)

        return once

    def tunix(folder, model):
        vocab = sizes.config(model)["vocab_size"]
        sample = peers.tunix_sampler(folder, vocab, PROMPT + new(model))
        prompts = [peers.text(row) for row in rows(folder, model).tolist()]

        def once():
            made = sample(prompts, max_generation_steps=new(model), max_prompt_length=PROMPT)
            return [token for row in made.tokens for token in row.tolist()]

        return once

    def llama_cpp(folder, model):
        net = peers.Llama(str(Path(folder, "model.gguf")), count, PROMPT + new(model), exact=model == "R")
        prompts = rows(folder, model)

        def once():
            return result(net.generate(prompts, new(model)).flatten().tolist(), model)

        return once

    return work, ours, transformers, tunix, llama_cpp


work, ours, transformers, tunix, llama_cpp = case(SLOTS)
