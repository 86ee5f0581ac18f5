// OpenAI's own SDK for JavaScript.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: 'none', maxRetries: 0 });
const number = { type: 'number' };
const add = {
  name: 'add',
  description: 'Adds.',
  parameters: { type: 'object', properties: { a: number, b: number }, required: ['a', 'b'] },
};
const tools = [{ type: 'function', function: add }];
const flat = [{ type: 'function', strict: false, ...add }];
const ask = (content, more) => ({ model: 'm', messages: [{ role: 'user', content }], ...more });
const shown = (item) => [item.type, item.status, item.arguments ?? item.content[0].text];
const CUT = [
  ['message', 'completed', 'Twice.'],
  ['function_call', 'completed', '{"a": 3, "b": 4}'],
  ['function_call', 'incomplete', '{"a": 5, '],
];

test('runTools', async () => {
  const run = { ...add, parse: JSON.parse, function: ({ a, b }) => String(a + b) };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools(ask('#add', { stream, tools: [{ type: 'function', function: run }] }));
    assert.equal(await runner.finalContent(), 'It is 3.5.');
  }
});

test('parsed answers', async () => {
  const schema = z.object({ kind: z.enum(['red', 'green']) });
  const chat = await client.chat.completions.parse(ask('x', { response_format: zodResponseFormat(schema, 's') }));
  const responses = await client.responses.parse({ model: 'm', input: 'x', text: { format: zodTextFormat(schema, 's') } });
  for (const made of [chat.choices[0].message.parsed, responses.output_parsed]) assert.ok(schema.safeParse(made).success);
});

test('texts of metadata', async () => {
  const { metadata } = await client.chat.completions.create(ask('#add'));
  for (const value of Object.values(metadata)) assert.equal(typeof value, 'string');
});

test('one call at most, and nulls', async () => {
  const nothing = { reasoning_effort: null, verbosity: null, store: null, stop: null, logit_bias: null };
  const one = await client.chat.completions.create(ask('#twice', { tools, parallel_tool_calls: false, ...nothing }));
  assert.deepEqual([one.choices[0].message.tool_calls.length, one.choices[0].finish_reason], [1, 'tool_calls']);
});

test('responses that go on from earlier ones', async () => {
  const first = await client.responses.create({ model: 'm', input: '#add', tools: flat });
  const result = { type: 'function_call_output', call_id: first.output.at(-1).call_id, output: '3.5' };
  const second = await client.responses.create({ model: 'm', previous_response_id: first.id, input: [result], tools: flat });
  assert.deepEqual([second.output_text, second.store], ['It is 3.5.', true]);
});

test('calls that the limit of tokens cuts', async () => {
  const more = { model: 'm', input: '#twice', tools: flat, max_output_tokens: 7 };
  const stream = client.responses.stream(more);
  for (const done of [await client.responses.create(more), await stream.finalResponse()]) {
    assert.deepEqual([done.status, done.output.map(shown)], ['incomplete', CUT]);
  }
  const [choice] = (await client.chat.completions.create(ask('#twice', { tools, max_tokens: 7 }))).choices;
  const calls = choice.message.tool_calls.map((call) => call.function.arguments);
  assert.deepEqual([choice.finish_reason, choice.message.content, calls], ['length', 'Twice.', CUT.slice(1).map((x) => x[2])]);
});
