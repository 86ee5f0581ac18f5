"""An agent written with the OpenAI SDK: it knows nothing of training."""

from openai import AsyncOpenAI

from areax.rollout.tasks import tool_choice

FUNCTIONS = [("calculator", "Adds two numbers.", "expression"), ("lookup", "Says whom somebody works with.", "name")]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, description, argument in FUNCTIONS
]


class Agent:
    """Calls tools until it has an answer."""

    async def run(self, row, base_url=None, api_key=None):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages = [{"role": "user", "content": row["prompt"]}]
            for _ in range(3):
                reply = await client.chat.completions.create(model="areax", messages=messages, tools=TOOLS)
                said = reply.choices[0].message
                if not said.tool_calls:
                    return tool_choice.reward(said.content or "", row)
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls:
                    told = tool_choice.call(call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
            return 0.0
