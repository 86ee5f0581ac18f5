"""Conversations with images: samples have the tokens that were sampled from, and the images in their order."""

import asyncio
import base64

import pytest
import vlm

from areax.adapters import tokenizer
from areax.adapters.data import images
from areax.rollout.chat.session import Session
from areax.rollout.types import Completion, Sampling
from areax.rollout.workflows import multi_turn, single_turn

FIRST, SECOND = vlm.png(8, 8, 1), vlm.png(12, 12, 2)  # 4 and 9 features
END = 3  # <|im_end|>
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = vlm.folder(tmp_path_factory.mktemp("vlm") / "model")
    return tokenizer.load(path), images.load(path)


def url(data):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": list(parts)}


class Engine:
    """A scripted engine, which records what it is asked."""

    def __init__(self, tokens):
        self.tokens, self.asked, self.says = tokens, [], []

    async def __call__(self, prompt, images=(), **sampling):
        said = self.says.pop(0)
        ids = [*(self.tokens.encode(said, add_special_tokens=False) if isinstance(said, str) else said), END]
        self.asked.append((prompt, tuple(image.data for image in images)))
        return Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop")


def told(model, *turns):
    """The prompt's tokens, written by hand from (text of the prompt, its images)."""
    tokens, processor = model
    words, seen = turns
    return processor.expanded(tokens.encode(words, add_special_tokens=False), [images.read(data) for data in seen])


def talk(model, engine, messages_and_answers):
    """A session in which each turn's messages follow the answer before."""
    session, messages = Session(engine, *model), []

    async def episode():
        for said, answer in messages_and_answers:
            messages.extend(said)
            engine.says.append(answer)
            messages.append((await session.ask(messages)).answer.message())

    asyncio.run(episode())
    session.set_reward(1.0)
    return session


def test_turns_extend_each_other_with_their_images(model):
    engine = Engine(model[0])
    again = {"type": "image", "image": SECOND}
    turns = [
        ([user(url(FIRST), text("a"))], "b"),
        ([user(text("c"))], "d"),
        ([user(text("e"), again, url(FIRST))], "f"),
    ]
    session = talk(model, engine, turns)
    one = f"<|im_start|>user\n{SEEN}a<|im_end|>\n<|im_start|>assistant\n"
    two = f"{one}b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    three = f"{two}d<|im_end|>\n<|im_start|>user\ne{SEEN}{SEEN}<|im_end|>\n<|im_start|>assistant\n"
    seen = [FIRST], [FIRST], [FIRST, SECOND, FIRST]
    assert engine.asked == [
        (told(model, words, some), tuple(some)) for words, some in zip((one, two, three), seen, strict=True)
    ]
    [row] = session.samples()
    assert row.tokens.tolist() == [*engine.asked[-1][0], *model[0].encode("f"), END]
    assert [image.data for image in row.images] == seen[-1]
    assert (row.tokens == vlm.IMAGE).sum() == 4 + 9 + 4 and row.mask.sum() == 6
    assert row.info["prompt"] == one and row.info["text"].count("<|image_pad|>") == 2
    assert [x.extends for x in session.interactions] == [False, True, True]
    [*rows] = session.samples(style="interactions")
    assert [len(row.images) for row in rows] == [1, 1, 3]


def test_another_image_is_another_conversation(model):
    engine, session = Engine(model[0]), None
    session = Session(engine, *model)

    async def episode():
        engine.says += ["b", "c", "d"]
        first = [user(url(FIRST), text("a"))]
        reply = (await session.ask(first)).answer.message()
        other = await session.ask([user(url(SECOND), text("a")), reply, user(text("e"))])
        same = await session.ask([*first, reply, user(text("e"))])
        return other, same

    other, same = asyncio.run(episode())
    assert other.parent is None and other.images[0].data == SECOND
    assert same.parent is session.interactions[0] and same.extends and same.images[0].data == FIRST


def test_a_sampled_image_token_ends_the_sequence(model):
    """Behind it servers and trainer would take it for a feature of an image."""
    engine = Engine(model[0])
    session = talk(model, engine, [([user(url(FIRST), text("a"))], [41, vlm.IMAGE]), ([user(url(SECOND))], "b")])
    said = model[0].decode([41])
    words = f"<|im_start|>user\n{SEEN}a<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n"
    words += f"<|im_start|>user\n{SEEN}<|im_end|>\n<|im_start|>assistant\n"
    assert engine.asked[1] == (told(model, words, [FIRST, SECOND]), (FIRST, SECOND))
    first, second = session.samples()
    assert first.tokens.tolist() == [*engine.asked[0][0], 41, vlm.IMAGE, END] and len(first.images) == 1
    assert first.mask.sum() == 3 and second.mask.sum() == 2 and len(second.images) == 2
    assert [x.extends for x in session.interactions] == [False, False]


def test_what_is_refused(model):
    engine, tokens = Engine(model[0]), model[0]
    for session, ask, words in [
        (Session(engine, tokens), [user(url(FIRST))], "this model reads no images"),
        (Session(engine, *model), [user(text("a <|image_pad|>"))], "got 1 for 0"),
        (Session(engine, *model), [user({"type": "image"})], "NoneType"),
        (Session(engine, *model), [user({"type": "input_audio"})], "text or an image, got 'input_audio'"),
        (Session(engine, *model), [user(url(b"no"))], "are no image"),
    ]:
        with pytest.raises(ValueError, match=words):
            asyncio.run(session.ask(ask))
    with pytest.raises(ValueError, match="got 1 for 0"):
        asyncio.run(Session(engine, *model).complete([5, vlm.IMAGE, 6]))
    assert not engine.asked


@pytest.mark.parametrize("workflow", [single_turn, multi_turn.multi_turn, multi_turn.judged])
def test_workflows_pass_images_on(model, workflow):
    tokens, processor = model
    engine, row = Engine(tokens), {"prompt": "which <image>?", "images": [FIRST]}
    engine.says += ["a", "5"]
    contexts = []

    async def reward(answer, row, **context):
        contexts.append(context)
        return 1.0

    more = {"question": "{question} {answer}"} if workflow is multi_turn.judged else {"reward": reward}
    made = asyncio.run(workflow(engine, row, tokenizer=tokens, processor=processor, sampling=Sampling(), **more))
    [sample] = made if isinstance(made, list) else [made]
    words = f"<|im_start|>user\nwhich {SEEN}?<|im_end|>\n<|im_start|>assistant\n"
    assert engine.asked[0] == (told(model, words, [FIRST]), (FIRST,))
    assert [image.data for image in sample.images] == [FIRST] and sample.info["prompt"] == words
    assert sample.tokens.tolist() == [*engine.asked[0][0], *tokens.encode("a"), END]
    assert not contexts or (contexts[0]["prompt"], contexts[0]["prompt_ids"]) == (words, engine.asked[0][0])
    if workflow is multi_turn.judged:
        assert engine.asked[1][1] == (FIRST,) and "which ? a<" in tokens.decode(engine.asked[1][0])
