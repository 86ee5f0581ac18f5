"""What SGLang's own parsers read: `python parse.py < REQUEST`, in the environment of install.sh.

The request is JSON, {"tools": [...], "answers": [[call parser, reasoning parser or "", text, opened], ...]}. Prints for
each answer [reasoning, content, [[name, arguments], ...]], the arguments as text; null if SGLang's parser raises, or
takes more than LONG seconds, as its patterns may for calls that are broken.
"""

import json
import logging
import signal
import sys

import serve  # noqa: F401 - loads what SGLang needs on a CPU
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

LONG = 2
logging.disable(logging.CRITICAL)


class Late(BaseException):
    """Not an Exception, which SGLang's parsers catch."""


def stop(*_):
    raise Late


def read(tools, calls, thoughts, text, opened):
    reasoning = ""
    if thoughts:
        parser = ReasoningParser(thoughts, stream_reasoning=False, force_reasoning=opened)
        reasoning, text = parser.parse_non_stream(text)
    if not calls:
        return [reasoning or "", text or "", []]
    content, found = FunctionCallParser(tools, calls).parse_non_stream(text or "")
    return [reasoning or "", content or "", [[call.name, call.parameters] for call in found]]


def main():
    request = json.load(sys.stdin)
    tools = [Tool(**tool) for tool in request["tools"]]
    signal.signal(signal.SIGALRM, stop)
    out = []
    for answer in request["answers"]:
        signal.alarm(LONG)
        try:
            out.append(read(tools, *answer))
        except (Exception, Late):  # whatever it is, it is SGLang's answer
            out.append(None)
        signal.alarm(0)
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
