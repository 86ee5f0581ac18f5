"""A program that knows nothing of areax.

Its errand comes as JSON on standard input, address and key in the environment; the last line it prints is its result.
"""

import json
import os
import sys
import urllib.request

ROW = json.load(sys.stdin)
COLLEAGUES = dict(pair.split() for pair in ROW["colleagues"])
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("calculator", "lookup")]


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "areax", "messages": messages, "tools": TOOLS}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def use(name, given):
    if name == "calculator":
        numbers = given.get("expression", "").split("+")
        return str(sum(map(int, numbers))) if all(map(str.isdecimal, numbers)) else "nothing"
    return COLLEAGUES.get(given.get("name"), "nothing")


messages = [{"role": "user", "content": ROW["prompt"]}]
said = ask(messages)
for call in said.get("tool_calls") or ():
    told = use(call["function"]["name"], json.loads(call["function"]["arguments"]))
    messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": told}]
    said = ask(messages)
print(json.dumps({"reward": float(said.get("content") == ROW["answer"])}))
