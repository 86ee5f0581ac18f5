"""The Anthropic messages API of the gateway, used through the unmodified SDK."""

from gateways import CALL, SCHEMA, USER, extends, served


def test_messages():
    async def test(place):
        place.engine.say(f"Hm.\n</think>\n\nI add.{CALL}{CALL}", "It is 3.5.")
        tools = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]
        asked = {
            "model": "claude-x", "max_tokens": 2000, "system": [{"type": "text", "text": "Add."}], "tools": tools,
            "messages": USER, "thinking": {"type": "enabled", "budget_tokens": 1024},
        }  # fmt: skip
        async with place.anthropic() as client:
            count = await client.messages.count_tokens(**{k: v for k, v in asked.items() if k != "max_tokens"})
            first = await client.messages.create(**asked, stop_sequences=["###"], metadata={"user_id": "me"})
            thinking, text, a, b = first.content
            assert (thinking.thinking, text.text, a.input, first.stop_reason) == (
                "Hm.", "I add.", {"a": 1, "b": 2.5}, "tool_use",
            )  # fmt: skip
            x = place.session.interactions[0]
            assert (first.id, first.usage.output_tokens) == (x.id, len(x.completion.tokens))
            assert first.usage.input_tokens == count.input_tokens == len(x.prompt)
            assert place.engine.texts[0].endswith("<think>\n") and "system\nAdd." in place.engine.texts[0]
            assert place.engine.asked[0] == {"max_new_tokens": 2000, "stop": ("###",)}
            results = [
                {"type": "tool_result", "tool_use_id": a.id, "content": "3.5"},
                {"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": "3.5"}]},
                {"type": "text", "text": "And?"},
            ]
            asked |= {
                "messages": [
                    *USER,
                    {"role": "assistant", "content": first.content},
                    {"role": "user", "content": results},
                ]
            }
            second = await client.messages.create(**asked | {"thinking": {"type": "disabled"}})
            assert second.content[0].text == "It is 3.5." and second.stop_reason == "end_turn"
            assert (
                "<|im_start|>tool\n3.5<|im_end|>\n<|im_start|>tool\n3.5<|im_end|>\n<|im_start|>user\nAnd?"
                in (place.engine.texts[1])
            )
            place.engine.say("cut o", finish="length")
            cut = await client.messages.create(model="m", max_tokens=5, messages=USER)
            assert (cut.stop_reason, place.session.interactions[-1].parent) == ("max_tokens", None)
            place.engine.info = {"finish_reason": {"type": "stop", "matched": "##"}}
            place.engine.say("so##")
            ended = await client.messages.create(model="m", max_tokens=5, messages=USER, stop_sequences=["##"])
            assert (ended.content[0].text, ended.stop_reason, ended.stop_sequence) == ("so", "stop_sequence", "##")

    served(test)


def test_messages_of_one_conversation_extend_each_other():
    async def test(place):
        place.engine.say(f"<think>\nHm.\n</think>\n\nI add.{CALL}", "It is 3.5.")
        tools = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]
        async with place.anthropic() as client:
            first = await client.messages.create(model="m", max_tokens=50, messages=USER, tools=tools)
            result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "3.5"}
            messages = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            await client.messages.create(model="m", max_tokens=50, messages=messages, tools=tools)
        assert len(place.session.interactions) == 2 and extends(place)

    served(test)


def test_streamed_messages():
    async def test(place):
        place.engine.say(f"<think>Hm.</think>I add.{CALL}{CALL}")
        tools = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]
        async with place.anthropic() as client:
            async with client.messages.stream(model="m", max_tokens=50, messages=USER, tools=tools) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (final.content[0].thinking, final.content[1].text) == ("Hm.", "I add.")
        assert final.content[3].input == {"a": 1, "b": 2.5}
        x = place.session.interactions[0]
        assert (final.id, final.stop_reason) == (x.id, "tool_use")
        assert (final.usage.input_tokens, final.usage.output_tokens) == (len(x.prompt), len(x.completion.tokens))
        assert events[0].message.usage.input_tokens == len(x.prompt)
        kinds = [event.type for event in events]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4

    served(test)
