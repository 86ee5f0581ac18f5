"""Run with the Python of .venv: python program.py FOLDER serves a model that calls a tool, from a new folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import parrot  # noqa: E402

from areax.rollout.engine import server  # noqa: E402

CALL = ["#add", "I add. ", "<tool_call>", '\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n', "</tool_call>"]
TWICE = [
    "#twice", "Twice. ", "<tool_call>\n", '{"name": "add", "arguments": {"a": 3, ', '"b": 4}}', "\n</tool_call>\n",
    "<tool_call>\n ", '{"name": "add", "arguments": {"a": 5, ', '"b": 6}}', "\n</tool_call>",
]  # fmt: skip
SUM = ["<go on>", "It ", "is ", "3.5", "."]

if __name__ == "__main__":
    server.serve(str(parrot.model(Path(sys.argv[1]), CALL, SUM, TWICE, context=2048)), port=0)
