"""The same agent written with the Anthropic SDK."""

import json

from anthropic import AsyncAnthropic

from areax.rollout.tasks import tool_choice

FUNCTIONS = [("calculator", "Adds two numbers.", "expression"), ("lookup", "Says whom somebody works with.", "name")]
TOOLS = [
    {
        "name": name,
        "description": description,
        "input_schema": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
    }
    for name, description, argument in FUNCTIONS
]


async def run(row, base_url, api_key):
    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        messages = [{"role": "user", "content": row["prompt"]}]
        for _ in range(3):
            reply = await client.messages.create(model="areax", max_tokens=32, messages=messages, tools=TOOLS)
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return tool_choice.reward("".join(block.text for block in reply.content if block.type == "text"), row)
            told = [
                {"type": "tool_result", "tool_use_id": x.id, "content": tool_choice.call(x.name, json.dumps(x.input))}
                for x in calls
            ]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": told}]
    return 0.0
