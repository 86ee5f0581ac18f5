"""Tools for models: `tool(function)` makes a `Tool` of any function with type hints, `call` executes a tool call.

A mistake by the model becomes text for it to read, "error: ...", never an exception in the workflow.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import contextvars
import functools
import inspect
import json
import logging
import math
import operator
import re
import threading
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .. import sandbox
from ..chat import json_types
from ..errors import ServerError
from ..sandbox import Limits, Sandbox

log = logging.getLogger(__name__)

SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what servers of the OpenAI API accept
SHOWN = 300  # most characters of an error that the model sees

OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
BITS = 4096  # most bits of an integer in `calculator`
EXPRESSION = re.compile(r"[0-9eE_.+*/%()\s-]{1,1000}")


@dataclass(frozen=True)
class Tool:
    """A function for models, with the description they see.

    Attributes:
      parameters: JSON schema of the arguments, of type object.
      call: takes the arguments by name; a coroutine function is awaited, a plain one runs in a thread.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., Any]

    def __post_init__(self):
        import jsonschema

        if not NAME.fullmatch(self.name):
            raise ValueError(f"Tool: a name needs 1 to 64 letters, digits, _ or -, got {self.name!r}")
        try:
            jsonschema.Draft202012Validator.check_schema(self.parameters)
        except jsonschema.SchemaError as error:
            raise ValueError(f"Tool: the parameters of {self.name} are not a JSON schema: {error.message}") from None
        if json_types.types(json_types.alternatives(self.parameters, self.parameters)) != {"object"}:
            raise ValueError(f'Tool: the parameters of {self.name} must have the type "object"')


def tool(function: Callable[..., Any]) -> Tool:
    """Makes a tool of a function from its name, docstring and type hints.

    The docstring above "Args:" describes the tool, the entries below it the parameters (Google style). Hints may be
    str, int, float, bool, None, list[...], dict[str, ...], Literal, unions of these, or missing; a parameter without a
    default is required.

    Raises:
      ValueError: a hint without a JSON schema, or a parameter that cannot be passed by name.
    """
    import docstring_parser

    name = getattr(function, "__name__", type(function).__name__)
    doc = docstring_parser.parse(inspect.getdoc(function) or "", docstring_parser.DocstringStyle.GOOGLE)
    descriptions = {param.arg_name: " ".join((param.description or "").split()) for param in doc.params}
    properties, required = {}, []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool: a model passes arguments by name, but {name} takes {parameter}")
        description = {"description": descriptions[parameter.name]} if descriptions.get(parameter.name) else {}
        properties[parameter.name] = hinted(parameter.annotation) | description
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name, "\n".join(filter(None, (doc.short_description, doc.long_description))), parameters, function)


def hinted(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint.

    Raises:
      ValueError: the hint is not supported.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    if hint is None or hint in SCALARS:
        return {"type": SCALARS[types.NoneType if hint is None else hint]}
    if origin is Literal and all(type(value) in SCALARS for value in inner):
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [hinted(one) for one in inner]}
    if hint is list or origin is list:
        return {"type": "array", **({"items": hinted(inner[0])} if inner else {})}
    if hint is dict or origin is dict and inner[0] is str:
        return {"type": "object", **({"additionalProperties": hinted(inner[1])} if inner else {})}
    raise ValueError(
        "tool: a hint must be str, int, float, bool, None, list[...], dict[str, ...], Literal or a union of these, "
        f"got {hint}"
    )


def schema(tool: Tool) -> dict[str, Any]:
    """The tool in OpenAI's format, which chat templates and servers expect."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


async def call(tools: Sequence[Tool], name: str, arguments: str, *, timeout_s: float = 60.0) -> str:
    """Calls the tool `name` and returns its result: a string unchanged, anything else as JSON.

    A thread cannot be killed: a plain function that times out keeps running in the background.

    Args:
      arguments: JSON, as the model wrote it; blank = none.

    Returns:
      "error: ..." for an unknown tool, arguments that are not JSON or do not match the schema, an exception raised by
      the tool, or a timeout.

    Raises:
      ServerError: raised by the tool for failures not caused by the model, such as an unreachable sandbox.
      ValueError: two tools have the same name.
    """
    named = {tool.name: tool for tool in tools}
    if len(named) < len(tools):
        raise ValueError(f"tools.call: names must differ, got {[tool.name for tool in tools]}")
    if name not in named:
        return _error(f"there is no tool {name!r:.80}; there are: {', '.join(named) or 'none'}")
    try:
        given = _arguments(named[name], arguments)
    except ValueError as error:
        return _error(f"arguments of {name}: {error}")
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            value = await called(named[name].call, **given)
    except ServerError:
        raise
    except Exception as error:  # any error of a tool is for the model to read
        if isinstance(error, TimeoutError) and deadline.expired():
            return _error(f"{name} took longer than {timeout_s:g} s")
        return _error(f"{name}: {type(error).__name__}: {error}")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _error(text: str) -> str:
    log.info("tools: %s", text)
    return f"error: {text if len(text) <= SHOWN else text[:SHOWN] + ' ...'}"


def _arguments(tool: Tool, text: str) -> dict[str, Any]:
    import jsonschema

    try:
        given = json.loads(text, parse_constant=_no_number) if text.strip() else {}
    except RecursionError:
        raise ValueError("nested too deeply") from None
    validator = jsonschema.Draft202012Validator(tool.parameters)
    if error := jsonschema.exceptions.best_match(validator.iter_errors(given)):
        raise ValueError(f"{error.json_path}: {error.message}")
    return given


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


async def called(function: Callable[..., Any], /, *arguments: Any, **given: Any) -> Any:
    """The result of a function, which runs in a thread unless it is a coroutine function."""
    bound = functools.partial(function, *arguments, **given)
    value = bound() if inspect.iscoroutinefunction(function) else await in_thread(bound)
    return await value if inspect.isawaitable(value) else value


def in_thread(function: Callable[[], Any]) -> Awaitable[Any]:
    """Like `asyncio.to_thread`, but a function that never returns blocks neither other calls nor the exit."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    answer: asyncio.Future[Any] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if isinstance(
            error, StopIteration | KeyboardInterrupt | GeneratorExit
        ):  # no future can hold it, or ends the loop
            error = ValueError(type(error).__name__)
        answer.set_result(value) if error is None else answer.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(function)
        except BaseException as raised:  # re-raised where it is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=work, daemon=True).start()
    return answer


def python_tool(box: Sandbox = sandbox, **limits: Any) -> Tool:
    """Makes a tool "python" that runs programs in a sandbox and returns their output.

    Args:
      box: the sandbox: this machine's, or one from `sandbox.remote.connect`.
      limits: fields of `sandbox.Limits`.
    """
    Limits(**limits)  # refuses invalid limits now

    async def python(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Each call is a program of its own: variables and files of earlier calls are gone.

        Args:
          code: the whole program; print() what you want to see.
        """
        result = await box.run_python(code, **limits)
        parts = [result.stdout, result.stderr]
        if result.why:
            parts.append(f"error: the program was ended by its limit on: {result.why}")
        elif result.code:
            parts.append(f"error: the program ended with code {result.code}")
        return "\n".join(part.rstrip("\n") for part in parts if part) or "(the program printed nothing)"

    return tool(python)


def calculator(expression: str) -> int | float:
    """Computes an arithmetic expression.

    Args:
      expression: numbers, + - * / // % ** and brackets, such as (2 + 3) * 4 ** 2 / 7
    """
    if not EXPRESSION.fullmatch(expression):
        raise ValueError(f"at most 1000 digits, + - * / // % ** and brackets, got {expression!r:.80}")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):  # the last two: too many brackets
        raise ValueError(f"this is no arithmetic expression: {expression!r:.80}") from None


def _value(node: ast.AST) -> int | float:
    result: Any
    match node:
        case ast.Constant(value) if type(value) in (int, float):
            result = value
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left, ast.Pow(), right):
            result = _power(_value(left), _value(right))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError(f"this is no arithmetic expression: {ast.unparse(node):.80}")
    if isinstance(result, complex) or isinstance(result, float) and not math.isfinite(result):
        raise ValueError(f"{ast.unparse(node):.80} is not a finite real number")
    if isinstance(result, int) and result.bit_length() > BITS:
        raise ValueError(f"{ast.unparse(node):.80} has more than {BITS} bits")
    return result


def _power(base: int | float, exponent: int | float) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * exponent > BITS:
        raise ValueError(f"a power has more than {BITS} bits")
    return base**exponent
