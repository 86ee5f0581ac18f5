"""What narrow weights and caches cost on a real model, SmolLM2-135M-Instruct (`real.py`), where it runs.

    python benchmarks/real_weights.py [--texts 100] [--write]

Perplexity is that of problems of GSM8K with their solutions, in the model's chat template, each by itself. The engine's
samples are answers to other problems at temperature 1; the trainer computes their log-probabilities again, in bf16 for
the engine in bf16, else in fp32. Drafts are found in the prompt, the answer so far and other samples of the prompt.
"""

import argparse
import dataclasses
import gc
import math
import tempfile

import numpy as np
import peers
import real
import run

ENGINES = {  # name: dtype of weights, options
    "fp32": ("float32", {}), "bf16": ("bfloat16", {}), "int8": ("float32", {"weights": "int8"}),
    "nf4": ("float32", {"weights": "nf4"}), "fp32, float8 cache": ("float32", {"kv_cache_dtype": "float8"}),
}  # fmt: skip
QUESTIONS, NEW, GROUP, DRAFT = 32, 64, 4, 4


def perplexity(logps) -> float:
    return math.exp(-np.concatenate(logps).mean())


def trainer(folder: str, dtype: str):
    """f(token ids of sequences) -> log-probabilities of each one's tokens but the first, as training computes them."""
    from functools import partial

    from areax import models
    from areax.adapters import hf
    from areax.core import packing, step
    from areax.rollout.types import supervised

    config, params = hf.load(folder)
    scores = step.make_scores(partial(models.score, config=config, run=models.Run(dtype=dtype)))

    def logps(sequences):
        samples = [supervised(ids[:1], ids[1:], sample=i, rollout=i, group=i) for i, ids in enumerate(sequences)]
        batch = packing.pack(samples, 1024, rows=1)
        return [logp[1:] for logp in packing.unpack(scores(params, batch).logp_BT, batch, samples)]

    return logps


def transformers(folder: str, dtype: str, sequences) -> float:
    import torch

    net, logps = peers.causal_lm(folder, dtype).eval(), []
    with torch.inference_mode():
        for ids in sequences:
            token = torch.tensor([ids])
            table = net(input_ids=token, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            logps.append(table.gather(-1, token[0, 1:, None])[:, 0].numpy())
    return perplexity(logps)


def sampled(engine, prompts, temperature: float):
    """Answers of an engine, one for each prompt."""
    from areax.rollout.engine.request import Request, Sampling

    how = Sampling(temperature=temperature, max_new_tokens=NEW)
    return engine.generate([Request(str(i), tuple(prompt), how) for i, prompt in enumerate(prompts)])


def opened(folder: str, dtype: str, **options):
    from areax.adapters import hf
    from areax.rollout.engine.engine import Engine

    return Engine(*hf.load(folder, dtype), slots=16, context=1024, **options)


def measure_engine(folder: str, name: str, sequences, prompts, trainers) -> dict:
    """Perplexity of an engine, and how far the trainer's log-probabilities are from those of its samples."""
    from areax.rollout.engine.request import Request, Sampling

    dtype, options = ENGINES[name]
    with opened(folder, dtype, **options) as engine:
        read = lambda ids: Request("", tuple(ids), Sampling(max_new_tokens=0), input_logprobs_from=0)
        asked = [dataclasses.replace(read(ids), rid=str(i)) for i, ids in enumerate(sequences)]
        own = perplexity([done.input_logp[1:] for done in engine.generate(asked)])
        answers = sampled(engine, prompts, 1.0)
    theirs = trainers[dtype]([[*prompt, *done.tokens] for prompt, done in zip(prompts, answers, strict=True)])
    pairs = [(np.array(done.logp), logp[-len(done.tokens) :]) for done, logp in zip(answers, theirs, strict=True)]
    apart = np.concatenate([abs(a - b) for a, b in pairs])
    figures = {"mean": apart.mean(), "p99": np.quantile(apart, 0.99), "largest": apart.max()}
    return {"perplexity": own} | {part: float(x) for part, x in figures.items()}


def measure_drafts(folder: str, prompts, temperature: float, group: int) -> dict:
    """How many drafted tokens an engine accepts in `group` answers to each prompt, and tokens per sequence and step."""
    with opened(folder, "float32", draft=DRAFT) as engine:
        before = engine.stats()
        sampled(engine, [prompt for prompt in prompts for _ in range(group)], temperature)
        drafted, accepted, tokens = (engine.stats()[name] - before[name] for name in ("drafted", "accepted", "tokens"))
    return {"accepted": accepted / max(drafted, 1), "tokens_per_step": tokens / (tokens - accepted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=100, help="texts of which the perplexity is")
    parser.add_argument("--write", action="store_true", help="store the case `real_weights` of results.json")
    given = parser.parse_args()
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as root:
        folder = f"{root}/R"
        real.write("R", folder)
        tokens = AutoTokenizer.from_pretrained(folder)
        sequences = real.chats(tokens, real.problems("test", given.texts))
        ask = lambda row: [{"role": "user", "content": row["prompt"]}]
        prompts = [
            tokens.apply_chat_template(ask(row), add_generation_prompt=True, return_dict=False)
            for row in real.problems("train", QUESTIONS)
        ]
        trainers = {dtype: trainer(folder, dtype) for dtype in ("float32", "bfloat16")}
        found: dict = {}
        say = lambda name, figures: (found.update({name: figures}), print(f"{name}: {figures}", flush=True))
        for dtype, logps in trainers.items():
            say(f"transformers, {dtype}", {"perplexity": transformers(folder, dtype, sequences)})
            say(f"trainer, {dtype}", {"perplexity": perplexity(logps(sequences))})
        for name in ENGINES:
            say(f"engine, {name}", measure_engine(folder, name, sequences, prompts, trainers))
            gc.collect()
        for temperature, group in ((0.0, 1), (1.0, 1), (1.0, GROUP)):
            name = f"drafts, temperature {temperature:g}, groups of {group}"
            say(name, measure_drafts(folder, prompts[: QUESTIONS // GROUP], temperature, group))
    print(f"{sum(map(len, sequences)) - len(sequences)} tokens in {len(sequences)} texts\n\n{table(found)}")
    if given.write:
        row = {"case": "real_weights", "model": "R", "peer": "transformers", "unit": "perplexity"}
        here, there = (found[f"{side}, float32"]["perplexity"] for side in ("trainer", "transformers"))
        run.store([row | {"ours": here, "theirs": there, "ratio": there / here, "details": found} | run.origin()])


def table(found: dict) -> str:
    lines = ["| | perplexity | sampler to trainer: mean | 99 of 100 below | largest |", "|---|---|---|---|---|"]
    for name, figures in found.items():
        if "perplexity" in figures:
            apart = [f"{figures[part]:.1e}" if part in figures else "" for part in ("mean", "p99", "largest")]
            lines.append(" | ".join([f"| {name}", f"{figures['perplexity']:.3f}", *apart]) + " |")
    lines += ["", "| | drafted tokens accepted | tokens per step |", "|---|---|---|"]
    for name, figures in found.items():
        if "accepted" in figures:
            lines.append(f"| {name} | {figures['accepted']:.0%} | {figures['tokens_per_step']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
