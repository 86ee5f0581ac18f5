"""Run by test_lm_eval.py: python lm_program.py KIND MODEL ADDRESS FOLDER prints the results of lm-eval as JSON.

KIND is "hf" (transformers) or "api" (the address of an OpenAI API).
"""

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
target_delimiter: ""
"""
TASKS = {
    "continue": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["+"], do_sample: false, temperature: 0, max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choose": """
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
}


def evaluate(model: str, given: dict, tasks: list[str], folder: str, chat: bool) -> dict:
    done = lm_eval.simple_evaluate(
        model=model, model_args=given, tasks=tasks, task_manager=TaskManager(include_path=folder), batch_size=1,
        apply_chat_template=chat, log_samples=True, bootstrap_iters=0,
        **({"device": "cpu"} if model == "hf" else {}),
    )  # fmt: skip
    said = lambda doc: [r if isinstance(r, str) else list(r) for r in doc["filtered_resps"]]
    metric = {"continue": "exact_match,none", "choose": "acc,none"}
    return {
        name: {
            "score": done["results"][name][metric[name]],
            "said": [said(doc) for doc in sorted(done["samples"][name], key=lambda doc: doc["doc_id"])],
        }
        for name in tasks
    }


def main(kind: str, model: str, address: str, folder: str) -> dict:
    for name, text in TASKS.items():
        (Path(folder) / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder) + text)
    if kind == "hf":
        given = {"pretrained": model, "dtype": "float32", "max_length": 64}
        plain, chat = ("hf", given), ("hf", given)
    else:
        common = {
            "model": "areax",
            "tokenizer": model,
            "num_concurrent": 4,
            "max_length": 64,
            "eos_string": "<|im_end|>",
        }
        plain = (
            "local-completions",
            {**common, "base_url": f"{address}/completions", "tokenizer_backend": "huggingface"},
        )
        chat = "local-chat-completions", {**common, "base_url": f"{address}/chat/completions"}
    return {
        "plain": evaluate(*plain, ["continue", "choose"], folder, False),
        "chat": evaluate(*chat, ["continue"], folder, True),
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main(*sys.argv[1:])))
