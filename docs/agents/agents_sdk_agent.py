"""The same agent written with the OpenAI Agents SDK."""

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from areax.rollout.tasks import tool_choice

set_tracing_disabled(True)


@function_tool
def calculator(expression: str) -> str:
    """Adds two numbers."""
    return tool_choice.calculator(expression)


@function_tool
def lookup(name: str) -> str:
    """Says whom somebody works with."""
    return tool_choice.lookup(name)


async def run(row, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel(model="areax", openai_client=client)
        agent = Agent("errands", model=model, tools=[calculator, lookup], model_settings=ModelSettings(temperature=1.0))
        done = await Runner.run(agent, row["prompt"], max_turns=3)
    return tool_choice.reward(str(done.final_output), row)
