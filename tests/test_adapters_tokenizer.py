"""Tokenizers made here, chats, demonstrations, and decoding piece by piece against decoding at once."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from areax.adapters import tokenizer as tokenizers
from areax.adapters.tokenizer import Decoder

ROW = {"prompt": "25+16", "answer": "41", "completion": "41"}
CHAT = "<|im_start|>user\n25+16<|im_end|>\n<|im_start|>assistant\n"
SUMS = tokenizers.character("0123456789+")
BYTES = tokenizers.byte_level()
TEXT = "Grüße aus Zürich 😀👍🏽, ça va ? 数学は楽しい。 The quick brown fox doesn't jump ."


def trained():
    """Byte-level BPE with merges: some of its tokens hold parts of characters, some several."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    inner.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<s>")


def falling_back():
    """Like Llama 2 and Gemma: words begin with a mark, unknown characters become <0xE2>-like tokens."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdeé.", "▁a", "ab", "cd"]
    inner = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("a", "b"), ("c", "d")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


TRAINED, FALLING_BACK = trained(), falling_back()


def test_a_character_is_a_token():
    assert len(SUMS) == SUMS.vocab_size == 32
    assert sorted(SUMS.get_vocab().values()) == list(range(32))
    ids = tokenizers.prompt(SUMS, ROW)
    assert len(ids) == 13 and SUMS.decode(ids) == CHAT
    assert SUMS.decode(ids, skip_special_tokens=True) == "user\n25+16\nassistant\n"
    assert (SUMS.pad_token, SUMS.eos_token) == ("<pad>", "<|im_end|>") and SUMS.pad_token_id == 0


def test_a_byte_is_a_token():
    assert len(BYTES) == 288
    assert len(BYTES.encode("é😀")) == 6
    assert BYTES.decode(tokenizers.prompt(BYTES, ROW)) == CHAT


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back_from_bytes(text):
    assert BYTES.decode(tokenizers.encode(BYTES, text)) == text


@given(st.text("0123456789+\n"))
def test_texts_of_the_alphabet_come_back_from_characters(text):
    ids = tokenizers.encode(SUMS, text)
    assert SUMS.decode(ids) == text and len(ids) == len(text)


def test_a_character_outside_the_alphabet_is_refused():
    for function, content in ((tokenizers.encode, "2x5é"), (tokenizers.prompt, {"prompt": "2x5é"})):
        with pytest.raises(ValueError, match="no token for 'xé' in '2x5é'"):
            function(SUMS, content)
    with pytest.raises(ValueError, match="no token for 'tol' in 'tool'"):
        tokenizers.encode_chat(SUMS, [{"role": "tool", "content": "1"}])


@pytest.mark.parametrize("made", [SUMS, BYTES])
def test_saved_and_loaded_it_is_the_same(tmp_path, made):
    tokenizers.save(made, tmp_path)
    loaded = tokenizers.load(tmp_path)
    for each in (tokenizers.load(str(tmp_path)), loaded):
        assert each.get_vocab() == made.get_vocab() and each.chat_template == made.chat_template
        assert tokenizers.supervised(each, ROW) == tokenizers.supervised(made, ROW)
        assert (each.eos_token_id, each.pad_token_id) == (made.eos_token_id, made.pad_token_id)
        assert each.decode(tokenizers.prompt(each, ROW), skip_special_tokens=True) == "user\n25+16\nassistant\n"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"  # what transformers 4 can load too
    tokenizers.save(loaded, tmp_path / "again")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert config.items() <= json.loads((tmp_path / "again" / "tokenizer_config.json").read_text()).items()


def test_a_conversation_by_its_template():
    messages = [
        {"role": "system", "content": "1"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "4"},
    ]
    assert SUMS.decode(tokenizers.prompt(SUMS, {"messages": messages})) == (
        "<|im_start|>system\n1<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n"
    )


def test_demonstrations_end_with_the_end_of_turn():
    prompt, completion = tokenizers.supervised(SUMS, ROW)
    assert SUMS.decode(prompt) == CHAT and SUMS.decode(completion) == "41<|im_end|>"
    said = {"messages": [{"role": "user", "content": "25+16"}, {"role": "assistant", "content": "41"}]}
    assert tokenizers.supervised(SUMS, said) == (prompt, completion)
    whole = SUMS.apply_chat_template(said["messages"], return_dict=False)
    assert whole == [*prompt, *completion, *SUMS.encode("\n")]


def test_generation_stops_at_the_end_of_turn_and_of_text():
    assert tokenizers.stop_ids(SUMS) == (SUMS.convert_tokens_to_ids("<|im_end|>"),) == (SUMS.eos_token_id,)
    other = tokenizers.byte_level()
    other.eos_token = "<pad>"  # as in base models, whose templates end a turn with another token
    assert tokenizers.stop_ids(other) == (0, 2) and tokenizers.end_of_turn(other) == 2
    assert tokenizers.stop_ids(TRAINED) == (TRAINED.eos_token_id,)
    with pytest.raises(ValueError, match="no end-of-text token"):
        tokenizers.stop_ids(FALLING_BACK)


def test_without_a_template_a_prompt_is_plain_text():
    assert tokenizers.supervised(TRAINED, ROW) == (
        TRAINED.encode("25+16"),
        [*TRAINED.encode("41"), TRAINED.eos_token_id],
    )
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizers.prompt(TRAINED, {"messages": [{"role": "user", "content": "1"}]})


def test_what_a_template_refuses_is_refused_in_one_line():
    strict = tokenizers.byte_level()
    strict.chat_template = "{{ raise_exception('roles must\\nalternate') }}"
    with pytest.raises(ValueError, match="the chat template rejects the messages: roles must alternate"):
        tokenizers.prompt(strict, ROW)


@pytest.mark.parametrize(
    "function, row, message",
    [
        (tokenizers.prompt, {"question": "1"}, "needs messages or a prompt, got the fields \\['question'\\]"),
        (tokenizers.prompt, {"messages": [{"role": "user"}]}, "a message needs a role and a content"),
        (tokenizers.supervised, {"prompt": "1"}, "needs a completion, got the fields \\['prompt'\\]"),
    ],
)
def test_bad_rows_are_refused(function, row, message):
    with pytest.raises(ValueError, match=message):
        function(SUMS, row)


@pytest.mark.parametrize(
    "path, message",
    [("/no/such/folder", "no such folder"), ("a/b/c", "no such folder"), ("no-such/model", "cannot be loaded")],
)
def test_a_missing_tokenizer_is_refused(path, message):
    with pytest.raises(ValueError, match=message) as error:
        tokenizers.load(path)
    assert "\n" not in str(error.value)


def test_a_damaged_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer in the folder"):
        tokenizers.load(tmp_path)
    tokenizers.save(SUMS, tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match="tokenizer.json: damaged or half-written") as error:
        tokenizers.load(tmp_path)
    assert "\n" not in str(error.value)


def joined(decoder, chunks):
    pieces = [decoder.push(chunk) for chunk in chunks]
    assert decoder.text == "".join(pieces)
    return "".join(pieces) + decoder.finish(), pieces


def cut(ids, sizes):
    """The ids in chunks of the given sizes, the rest one by one."""
    for size in sizes:
        yield ids[:size]
        ids = ids[size:]
    yield from ([id] for id in ids)


def some_bytes():
    """Bytes of characters of every length, whole and broken."""
    parts = [c.encode() for c in "aé€😀\ufffd\n "] + [b"\xf0\x9f", b"\xe2\x82", b"\xc3", b"\x80", b"\xff", b"\xed\xa0"]
    return st.lists(st.sampled_from(parts), max_size=60).map(b"".join)


# Byte-level BPE writes printable bytes of Latin-1 as themselves and the others, in order, from U+0100 on.
OTHERS = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b)]
SPELLED = {b: chr(b) for b in range(256)} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}


@given(some_bytes(), st.lists(st.integers(0, 12), max_size=5))
def test_bytes_decode_piece_by_piece_as_at_once(content, sizes):
    ids = [BYTES.convert_tokens_to_ids(SPELLED[b]) for b in content]
    text, _ = joined(Decoder(BYTES), cut(ids, sizes))
    assert text == content.decode("utf-8", errors="replace") == BYTES.decode(ids)


@pytest.mark.parametrize("made", [SUMS, BYTES, TRAINED], ids=["character", "bytes", "merges"])
@given(data=st.data())
def test_any_ids_decode_piece_by_piece_as_at_once(made, data):
    ids = data.draw(st.lists(st.integers(0, len(made) + 3), max_size=80))  # some beyond the vocabulary
    sizes = data.draw(st.lists(st.integers(0, 12), max_size=5))
    for skip in (True, False):
        text, _ = joined(Decoder(made, skip_special_tokens=skip), cut(ids, sizes))
        assert text == made.decode(ids, skip_special_tokens=skip)


@given(st.text(st.sampled_from("abcdeé. 😀€"), max_size=60), st.lists(st.integers(0, 12), max_size=5))
def test_tokens_that_fall_back_to_bytes_decode_as_at_once(text, sizes):
    ids = FALLING_BACK.encode(text)
    assert joined(Decoder(FALLING_BACK), cut(ids, sizes))[0] == FALLING_BACK.decode(ids) == text


def test_pieces_come_as_soon_as_they_are_sure():
    _, pieces = joined(Decoder(BYTES), ([id] for id in BYTES.encode("aé😀<|im_end|>")))
    assert pieces == ["a", "", "é", "", "", "", "😀", ""]
    decoder = Decoder(BYTES)
    assert decoder.push(BYTES.encode("😀")[:3]) == "" and decoder.finish() == "\ufffd" and decoder.finish() == ""


def test_the_window_of_a_decoder_does_not_grow():
    decoder = Decoder(TRAINED)
    for id in TRAINED.encode(TEXT * 20):
        decoder.push([id])
        assert len(decoder._window) <= 2 * Decoder.CONTEXT
    assert decoder.text == TEXT * 20


def test_importing_it_loads_no_transformers():
    program = (
        "import sys, areax.adapters.tokenizer, areax.adapters.data.datasets\n"
        "print(*{'transformers', 'tokenizers', 'datasets', 'pyarrow', 'jax', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == [], done.stderr


def test_a_folder_that_names_the_plain_class_is_loaded_without_torch(tmp_path):
    tokenizers.save(SUMS, tmp_path)
    code = (
        "import sys; from areax.adapters import tokenizer; "
        f"assert tokenizer.load({str(tmp_path)!r})('1+1').input_ids; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", None])
def test_the_class_is_that_of_transformers(tmp_path, family):
    tokenizers.save(SUMS, tmp_path)
    if family:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert type(tokenizers.load(tmp_path)) is type(AutoTokenizer.from_pretrained(tmp_path))


def test_a_damaged_config_is_named(tmp_path):
    tokenizers.save(SUMS, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type"')
    with pytest.raises(ValueError, match="config.json: damaged"):
        tokenizers.load(tmp_path)
