"""Answers with calls, as the models of each family write them: made at random, for tests of parsers.

`WRITERS` are written from the families' chat templates, not from the parsers; `cases` also breaks and cuts what they
write.
"""

import json
import random
from typing import Any, NamedTuple

PARAMETERS = {
    "find": {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "exact": {"type": "boolean"},
        "ratio": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "filter": {"type": "object"},
        "note": {"type": ["string", "null"]},
    },
    "add": {"a": {"type": "number"}, "b": {"type": "number"}},
    "now": {},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": properties}},
    }
    for name, properties in PARAMETERS.items()
]
STRINGS = [
    "Paris", "", "été à 東京 😀", "two\nlines", "\n  indented\n", "it's", 'a "quoted" word', "{x}", "}", "a, b=c",
    "f(x)[0]", "[1, 2]", "]", "<b>bold</b>", "a < b", "C:\\new\\table", "\\n", "\t tab", "3", "true", "null", "{}",
    "```json\n{}\n```", "a: 1", "# a; b", "ends with space ",
]  # fmt: skip
TEXTS = ["I look it up.", "Let me see: 1 < 2.", "Zwei\n\nZeilen – ja.", '{"a": 1} is JSON.', "[1] says so."]
THOUGHTS = ["The user wants it.", "First a, then b.\nOr both?", "It's {odd} <b>."]
DUMPS = {"ensure_ascii": False}
BROKEN = "truncated", "broken"


class Case(NamedTuple):
    """An answer.

    Attributes:
      kind: what is in it; BROKEN ones may have no calls.
      reasoning, content, calls: what it says, unless it is broken.
    """

    kind: str
    text: str
    reasoning: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]


def hermes(calls):
    return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, **DUMPS)}\n</tool_call>" for n, a in calls)


def llama(calls):
    return ";".join(json.dumps({"name": n, "parameters": a}, **DUMPS) for n, a in calls)


def deepseek_v31(calls):
    made = "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a, **DUMPS)}<｜tool▁call▁end｜>" for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


def kimi(calls):
    made = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{json.dumps(a, **DUMPS)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{made}<|tool_calls_section_end|>"


def shown(value):
    return value if isinstance(value, str) else json.dumps(value, **DUMPS)


def glm(gap):
    """GLM-4.5 and 4.6 have a line break between tags, 4.7 and 5 nothing."""
    one = lambda n, a: "".join(
        f"<arg_key>{k}</arg_key>{gap}<arg_value>{shown(v)}</arg_value>{gap}" for k, v in a.items()
    )
    return lambda calls: gap.join(f"<tool_call>{n}{gap}{one(n, a)}</tool_call>" for n, a in calls)


def coder(calls):
    one = lambda a: "".join(f"<parameter={k}>\n{shown(v)}\n</parameter>\n" for k, v in a.items())
    return "\n".join(f"<tool_call>\n<function={n}>\n{one(a)}</function>\n</tool_call>" for n, a in calls)


def seed(calls):
    one = lambda a: "".join(f"<parameter={k}>{shown(v)}</parameter>\n" for k, v in a.items())
    return "\n".join(f"<seed:tool_call>\n<function={n}>\n{one(a)}</function>\n</seed:tool_call>" for n, a in calls)


def minimax(calls):
    one = lambda a: "".join(f'<parameter name="{k}">{shown(v)}</parameter>\n' for k, v in a.items())
    made = "".join(f'<invoke name="{n}">\n{one(a)}</invoke>\n' for n, a in calls)
    return f"<minimax:tool_call>\n{made}</minimax:tool_call>"


def dsml(block):
    """DeepSeek V3.2 and V4 name the block differently."""
    tag = lambda k, v: f'<｜DSML｜parameter name="{k}" string="{json.dumps(isinstance(v, str))}">'
    one = lambda a: "".join(f"{tag(k, v)}{shown(v)}</｜DSML｜parameter>\n" for k, v in a.items())
    made = lambda calls: "".join(f'<｜DSML｜invoke name="{n}">\n{one(a)}</｜DSML｜invoke>\n' for n, a in calls)
    return lambda calls: f"<｜DSML｜{block}>\n{made(calls)}</｜DSML｜{block}>"


def mistral_v7(calls):
    made = [{"name": n, "arguments": a, "id": f"{i:09}"} for i, (n, a) in enumerate(calls)]
    return f"[TOOL_CALLS] {json.dumps(made, **DUMPS)}"


def mistral_v11(calls):
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]{i:09}[ARGS]{json.dumps(a, **DUMPS)}" for i, (n, a) in enumerate(calls))


def mistral_v13(calls):
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a, **DUMPS)}" for n, a in calls)


def gemma_value(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(gemma_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v)}" for k, v in sorted(value.items())) + "}"
    return json.dumps(value)


def gemma(calls):
    return "".join(f"<|tool_call>call:{n}{gemma_value(a)}<tool_call|>" for n, a in calls)


def python(calls):
    """Strings and numbers as Python writes them, lists and objects as JSON: as LFM2's template."""
    value = lambda v: json.dumps(v, **DUMPS) if isinstance(v, list | dict) else repr(v)
    one = lambda a: ", ".join(f"{k}={value(v)}" for k, v in a.items())
    return ", ".join(f"{n}({one(a)})" for n, a in calls)


def lfm2(calls):
    return f"<|tool_call_start|>[{python(calls)}]<|tool_call_end|>"


def pythonic(calls):
    one = lambda a: ", ".join(f"{k}={v!r}" for k, v in a.items())
    return f"[{', '.join(f'{n}({one(a)})' for n, a in calls)}]"


def olmo3(calls):
    one = lambda a: ", ".join(f"{k}={json.dumps(v, **DUMPS)}" for k, v in a.items())
    made = "\n".join(f"{n}({one(a)})" for n, a in calls)
    return f"<function_calls>{made}</function_calls>"


def gpt_oss(calls):
    head = lambda n: f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>"
    return "<|start|>assistant".join(f"{head(n)}{json.dumps(a, **DUMPS)}<|call|>" for n, a in calls)


WRITERS = {  # format of calls, one way to write it -> (style, writer)
    "gpt_oss": ("gpt_oss", gpt_oss),
    "glm45": ("glm4_moe", glm("\n")),
    "glm47": ("glm4_moe", glm("")),
    "deepseek_v31": ("deepseek", deepseek_v31),
    "deepseek_v32": ("deepseek_v32", dsml("function_calls")),
    "deepseek_v4": ("deepseek_v4", dsml("tool_calls")),
    "kimi_k2": ("kimi_k2", kimi),
    "minimax_m2": ("minimax_m2", minimax),
    "mistral_v7": ("mistral", mistral_v7),
    "mistral_v11": ("mistral", mistral_v11),
    "mistral_v13": ("magistral", mistral_v13),
    "gemma4": ("gemma4", gemma),
    "nemotron3": ("qwen3_coder", coder),
    "lfm2": ("lfm2", lfm2),
    "pythonic": ("pythonic", pythonic),
    "olmo3": ("olmo3", olmo3),
    "llama": ("llama", llama),
    "qwen": ("qwen", hermes),
    "seed_oss": ("seed_oss", seed),
}
LAST = {"mistral_v7", "mistral_v11", "mistral_v13", "pythonic", "llama"}  # nothing follows the calls
ALONE = {"pythonic", "llama"}  # and nothing comes before
THINK = {
    "mistral_v13": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"


def value(kind, rng):
    if isinstance(kind, list):
        text = value(rng.choice([each for each in kind if each != "null"]), rng) if rng.random() < 0.7 else None
        return None if text == "null" else text  # formats without quotes write both alike
    return {
        "string": lambda: rng.choice(STRINGS),
        "integer": lambda: rng.choice([0, -7, 42, 10**12]),
        "number": lambda: rng.choice([0.5, -3, 1e-3, 2.5e10, 7]),
        "boolean": lambda: rng.random() < 0.5,
        "array": lambda: [rng.choice(STRINGS) for _ in range(rng.randrange(3))],
        "object": lambda: {
            "a": rng.choice([1, None, True, "x", [1, [2.5, "y"]], {"b": {"c": rng.choice(STRINGS)}}]), "k_2": [{}, []]
        },
    }[kind]()  # fmt: skip


def one(rng):
    """A call: its name and arguments."""
    name = rng.choice(["find", "find", "find", "add", "now"])
    keys = [key for key in PARAMETERS[name] if rng.random() < 0.6]
    return name, {key: value(PARAMETERS[name][key]["type"], rng) for key in keys}


def stripped(rng):
    """A call whose texts have no line breaks around them, which Seed-OSS drops."""
    name, arguments = one(rng)
    return name, {key: value.strip("\n") if isinstance(value, str) else value for key, value in arguments.items()}


def thinking(way, thought):
    if way == "gpt_oss":
        return f"{ANALYSIS}{thought}<|end|><|start|>assistant"
    begin, end = THINK.get(way, ("<think>", "</think>"))
    return f"{begin}{thought}\n{end}" if way == "gemma4" else f"{begin}{thought}{end}\n"


def cases(way, count=300, start=0):
    """Answers in the format `way`, a key of WRITERS."""
    return [case(way, random.Random(f"{way} {i}")) for i in range(start, start + count)]


def case(way, rng):
    write = WRITERS[way][1]
    kind = rng.choice(
        ["single", "single", "several", "before", "around", "thinking", "thinking before", "text", "truncated",
         "broken", "unfinished thought"]
    )  # fmt: skip
    call = stripped if way == "seed_oss" else one
    calls = [call(rng) for _ in range(rng.randrange(2, 4) if kind in ("several", "around") else 1)]
    text, content, reasoning = write(calls), "", ""
    said = f"{FINAL}%s<|end|><|start|>assistant" if way == "gpt_oss" else "%s\n"
    if kind == "text":
        content = rng.choice(TEXTS)
        text, calls = (f"{FINAL}{content}" if way == "gpt_oss" else content), []
    if kind in ("before", "around", "thinking before") and way not in ALONE:
        content = rng.choice(TEXTS)
        text = said % content + text
    if kind == "around" and way not in LAST | {"gpt_oss"}:
        more = [call(rng)]
        text, calls = f"{text}\nAnd then:\n{write(more)}\nThat is all.", calls + more
        content += "\nAnd then:\nThat is all."
    if kind in ("thinking", "thinking before"):
        reasoning = rng.choice(THOUGHTS)
        text = thinking(way, reasoning) + text
    if kind == "unfinished thought":
        reasoning, calls = rng.choice(THOUGHTS), []
        text = (ANALYSIS if way == "gpt_oss" else THINK.get(way, ("<think>", ""))[0]) + reasoning
    if kind == "truncated":
        text = text[: rng.randrange(1, len(text))]
    if kind == "broken":
        at = rng.randrange(len(text))
        text = text[:at] + text[at + rng.randrange(1, 4) :]
    return Case(kind, text, reasoning, content, calls)


def streamed(text, rng):
    """The text in random pieces."""
    while text:
        size = rng.choice([1, 1, 2, 3, 5, 8, 40])
        yield text[:size]
        text = text[size:]
