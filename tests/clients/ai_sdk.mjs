// Vercel's AI SDK as it comes: Responses by default, which refers to earlier items, and both chat clients.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const bodies = []; // of the requests so far
const options = {
  baseURL: `${process.argv[2]}/v1`,
  apiKey: 'none',
  fetch: (url, request) => (bodies.push(JSON.parse(request.body)), fetch(url, request)),
};
const openai = createOpenAI(options);
const models = {
  responses: openai('m'),
  chat: openai.chat('m'),
  compatible: createOpenAICompatible({ name: 'areax', supportsStructuredOutputs: true, ...options })('m'),
};
const add = tool({
  description: 'Adds.',
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const ask = { prompt: '#add', tools: { add }, stopWhen: stepCountIs(4), maxRetries: 0 };

for (const [name, model] of Object.entries(models)) {
  test(`${name}: a loop of tools`, async () => {
    const done = await generateText({ ...ask, model });
    assert.deepEqual([done.text, done.steps.length, done.finishReason], ['It is 3.5.', 2, 'stop']);
    assert.deepEqual(done.steps[0].toolCalls[0].input, { a: 1, b: 2.5 });
  });

  test(`${name}: a streamed loop of tools`, async () => {
    const stream = streamText({ ...ask, model });
    let text = '';
    for await (const piece of stream.textStream) text += piece;
    assert.deepEqual([text, (await stream.steps).length], ['I add.It is 3.5.', 2]);
  });

  test(`${name}: a second turn`, async () => {
    const first = await generateText({ ...ask, model });
    const messages = [{ role: 'user', content: '#add' }, ...first.response.messages, { role: 'user', content: '#twice' }];
    const second = await generateText({ model, messages, maxRetries: 0 });
    assert.match(second.text, /^Twice\./);
  });

  test(`${name}: an object`, async () => {
    const schema = z.object({ kind: z.enum(['red', 'green']), parts: z.array(z.boolean()).max(2) });
    const { object } = await generateObject({ model, schema, prompt: 'anything', maxRetries: 0 });
    assert.ok(schema.safeParse(object).success);
  });

  test(`${name}: calls that the limit of tokens cuts`, async () => {
    const done = await generateText({ ...ask, model, prompt: '#twice', stopWhen: stepCountIs(1), maxOutputTokens: 7 });
    assert.deepEqual([done.text, done.finishReason], ['Twice.', 'length']);
    assert.deepEqual(done.toolCalls.map((call) => call.input), [{ a: 3, b: 4 }, '{"a": 5, ']);
  });

  test(`${name}: one call at most, and the default effort and verbosity`, async () => {
    const wanted = { reasoningEffort: 'medium', textVerbosity: 'medium' };
    const providerOptions = {
      openai: { parallelToolCalls: false, ...wanted },
      areax: { parallel_tool_calls: false, ...wanted },
    };
    const done = await generateText({ ...ask, model, prompt: '#twice', stopWhen: stepCountIs(1), providerOptions });
    assert.deepEqual(done.toolCalls.map((call) => call.input), [{ a: 3, b: 4 }]);
  });
}

test('earlier items are references', () => {
  const kinds = bodies.flatMap((body) => body.input ?? []).map((item) => item.type);
  assert.ok(kinds.includes('item_reference'));
});
