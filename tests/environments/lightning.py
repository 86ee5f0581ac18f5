"""Agents as agent-lightning has them."""

import agentlightning as agl
import openai
from agentlightning.types import SpanCoreFields


def question(task):
    return [{"role": "user", "content": f"What is {task['a']} + {task['b']}?"}]


def score(task, text):
    return float(text.strip() == str(task["a"] + task["b"]))


@agl.rollout
def adder(task, llm):
    """As in agent-lightning's documentation: a function that returns a reward."""
    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        said = client.chat.completions.create(model=llm.model, messages=question(task))
    return score(task, said.choices[0].message.content)


@agl.rollout
async def emitter(task, llm: agl.LLM, rollout: agl.Rollout) -> None:
    """Asks twice, and emits a reward each time, of which the last counts."""
    messages = question(task)
    async with openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key) as client:
        for _ in range(2):
            said = await client.chat.completions.create(model=llm.model, messages=messages)
            text = said.choices[0].message.content
            short = float(len(text) < 3)
            agl.emit_reward({"right": score(task, text), "short": short}, primary_key="right")
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Sure, {rollout.mode}?"}]


class Spans(agl.LitAgent):
    """Returns what it recorded itself."""

    def __init__(self, bonus=0.0):
        super().__init__()
        self.bonus = bonus

    def rollout(self, task, resources, rollout):
        llm = resources["main_llm"]
        with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            said = client.chat.completions.create(model=llm.model, messages=question(task))
        reward = self.bonus + score(task, said.choices[0].message.content)
        self.tracer.create_span("an operation")
        recorded: SpanCoreFields = agl.emit_reward(reward, propagate=False)
        return [recorded]


@agl.rollout
def silent(task, llm):
    adder(task, llm)


@agl.rollout
def broken(task, llm):
    adder(task, llm)
    raise KeyError("no such machine")


@agl.prompt_rollout
def prompted(task, prompt_template):
    return 1.0


def plain(task, llm):
    return 1.0
