"""What llama.cpp says of GGUF files, in an environment of its own: python judge.py JOBS.json > ANSWERS.json

A job with {"source", "kind"} first makes the file `path` of the file `source`, by llama.cpp's own quantiser.

A job is {"path", "prompts": [ids], "new": tokens, "score": [ids], "texts": [str], "chats": [messages]}; its answer has
greedy continuations, the log-probability of each token of `score` behind the first, ids of texts, and rendered chats.
"""

import json
import sys

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter


def quantise(job):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.pure = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{job['kind']}"), job["pure"]
    assert llama_cpp.llama_model_quantize(job["source"].encode(), job["path"].encode(), params) == 0


def judge(job):
    if "source" in job:
        quantise(job)
    # One token at a time and keys in fp32, so that rounding is that of the weights' type; one at a time also keeps away
    # from AMX, which crashes where the system does not allow it.
    exact = {"n_batch": 1, "type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(job["path"], n_ctx=512, logits_all=True, verbose=False, n_threads=2, **exact)
    answer = {"greedy": [], "logps": [], "ids": [], "chats": []}
    for ids in job.get("prompts", ()):
        model.reset()
        made = model.generate(ids, temp=0.0, repeat_penalty=1.0)
        answer["greedy"].append([next(made) for _ in range(job["new"])])
    for ids in job.get("score", ()):
        model.reset()
        model.eval(ids)
        logits = model.scores[: len(ids)].astype(np.float64)
        logps = logits - logits.max(-1, keepdims=True)
        logps -= np.log(np.exp(logps).sum(-1, keepdims=True))
        answer["logps"].append([float(logps[i, id]) for i, id in enumerate(ids[1:])])
    for text in job.get("texts", ()):
        answer["ids"].append(model.tokenize(text.encode(), add_bos=True, special=True))
    data = model.metadata
    ids = {name: data.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    text = lambda name: model._model.token_get_text(int(ids[name])) if ids[name] else ""
    for messages in job.get("chats", ()):
        render = Jinja2ChatFormatter(data["tokenizer.chat_template"], text("eos"), text("bos"))
        answer["chats"].append(render(messages=messages).prompt)
    vocab, adds = model._model.vocab, (llama_cpp.llama_vocab_get_add_bos, llama_cpp.llama_vocab_get_add_eos)
    answer["ends"] = [id for id in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, id)]
    answer["adds"] = [bool(add(vocab)) for add in adds]
    model.close()
    return answer


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps([judge(job) for job in json.load(file)]))
