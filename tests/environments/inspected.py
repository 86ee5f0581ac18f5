"""Tasks as inspect-ai has them."""

import time

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelAPI, ModelOutput, ModelUsage, modelapi
from inspect_ai.scorer import Score, accuracy, includes, match, model_graded_qa, scorer
from inspect_ai.solver import generate, solver, system_message, use_tools
from inspect_ai.tool import tool


def samples(first=0):
    return [Sample(input=f"What is {n} + 1?", target=str(n + 1)) for n in range(first, first + 6)]


@task
def sums(first=0):
    return Task(dataset=samples(first), solver=[system_message("Answer with a number."), generate()], scorer=match())


@tool
def add():
    async def execute(a: int, b: int):
        """Adds two numbers.

        Args:
            a: one.
            b: the other.
        """
        return str(a + b)

    return execute


@task
def tools():
    return Task(dataset=samples(), solver=[use_tools(add()), generate()], scorer=[includes(), size()])


@task
def agent():
    return Task(dataset=samples(), solver=react(tools=[add()], attempts=1), scorer=includes())


@scorer(metrics=[accuracy()])
def size():
    async def score(state, target):
        return Score(value=len(state.output.completion))

    return score


@scorer(metrics=[accuracy()])
def several():
    async def score(state, target):
        return Score(value={"a": 1, "b": 0})

    return score


@solver
def broken():
    async def solve(state, generate):
        await generate(state)
        raise RuntimeError("no such machine")

    return solve


@solver
def long():
    async def solve(state, generate):
        await generate(state)
        raise RuntimeError("the page exceeds the browser's context length")

    return solve


@scorer(metrics=[accuracy()])
def saying(what):
    async def score(state, target):
        if what == "too long":
            raise RuntimeError("http://judge: HTTP 400: this model's maximum context length is 8192 tokens")
        return None if what == "none" else Score(value=what)

    return score


@modelapi(name="kind")
class Grader(ModelAPI):
    """A grader that is always content."""

    async def generate(self, input, tools, tool_choice, config):
        assert "X-Session-ID" not in (config.extra_headers or {})
        made = ModelOutput.from_content(self.model_name, "GRADE: C")
        made.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
        return made


@solver
def hangs():
    async def solve(state, generate):
        await generate(state)
        time.sleep(6)

    return solve


@task
def says(what, second=None):
    scorers = [saying(what), *([] if second is None else [size()])]
    return Task(dataset=samples(), solver=generate(), scorer=scorers)


@task
def wrong(kind):
    solvers = {"solver": broken(), "hangs": hangs(), "long": long()}
    scorers = {"graded": model_graded_qa(), "several": several(), "none": None}
    return Task(dataset=samples(), solver=solvers.get(kind, generate()), scorer=scorers.get(kind, match()))
