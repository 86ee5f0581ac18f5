"""Character and byte-level tokenizers, chat templates and demonstrations."""

import json
import os
import subprocess
import sys

import pytest
import wordpieces
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from areax.adapters import tokenizer as tokenizers
from areax.rollout.chat import template

ROW = {"prompt": "25+16", "answer": "41", "completion": "41"}
CHAT = "<|im_start|>user\n25+16<|im_end|>\n<|im_start|>assistant\n"
SUMS = tokenizers.character("0123456789+")
BYTES = tokenizers.byte_level()


TRAINED, FALLING_BACK = wordpieces.trained(), wordpieces.falling_back()


def test_the_character_tokenizer_has_a_token_per_character():
    assert len(SUMS) == SUMS.vocab_size == 32
    assert sorted(SUMS.get_vocab().values()) == list(range(32))
    ids = template.prompt(SUMS, ROW)
    assert len(ids) == 13 and SUMS.decode(ids) == CHAT
    assert SUMS.decode(ids, skip_special_tokens=True) == "user\n25+16\nassistant\n"
    assert (SUMS.pad_token, SUMS.eos_token) == ("<pad>", "<|im_end|>") and SUMS.pad_token_id == 0


def test_the_byte_level_tokenizer_has_a_token_per_byte():
    assert len(BYTES) == 288
    assert len(BYTES.encode("é😀")) == 6
    assert BYTES.decode(template.prompt(BYTES, ROW)) == CHAT


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_round_trips_through_bytes(text):
    assert BYTES.decode(tokenizers.encode(BYTES, text)) == text


@given(st.text("0123456789+\n"))
def test_texts_of_the_alphabet_round_trip_through_characters(text):
    ids = tokenizers.encode(SUMS, text)
    assert SUMS.decode(ids) == text and len(ids) == len(text)


def test_a_character_outside_the_alphabet_is_refused():
    for function, content in ((tokenizers.encode, "2x5é"), (template.prompt, {"prompt": "2x5é"})):
        with pytest.raises(ValueError, match="no token for 'xé' in '2x5é'"):
            function(SUMS, content)
    with pytest.raises(ValueError, match="no token for 'tol' in 'tool'"):
        template.prompt(SUMS, {"messages": [{"role": "tool", "content": "1"}]})


@pytest.mark.parametrize("made", [SUMS, BYTES])
def test_saving_and_loading_changes_nothing(tmp_path, made):
    tokenizers.save(made, tmp_path)
    loaded = tokenizers.load(tmp_path)
    for each in (tokenizers.load(str(tmp_path)), loaded):
        assert each.get_vocab() == made.get_vocab() and each.chat_template == made.chat_template
        assert tokenizers.supervised(each, ROW) == tokenizers.supervised(made, ROW)
        assert (each.eos_token_id, each.pad_token_id) == (made.eos_token_id, made.pad_token_id)
        assert each.decode(template.prompt(each, ROW), skip_special_tokens=True) == "user\n25+16\nassistant\n"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 can load it, too
    tokenizers.save(loaded, tmp_path / "again")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert config.items() <= json.loads((tmp_path / "again" / "tokenizer_config.json").read_text()).items()


def test_a_conversation_is_rendered_by_the_chat_template():
    messages = [
        {"role": "system", "content": "1"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "4"},
    ]
    assert SUMS.decode(template.prompt(SUMS, {"messages": messages})) == (
        "<|im_start|>system\n1<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n"
    )


def test_demonstrations_end_with_the_end_of_turn_token():
    prompt, completion = tokenizers.supervised(SUMS, ROW)
    assert SUMS.decode(prompt) == CHAT and SUMS.decode(completion) == "41<|im_end|>"
    said = {"messages": [{"role": "user", "content": "25+16"}, {"role": "assistant", "content": "41"}]}
    assert tokenizers.supervised(SUMS, said) == (prompt, completion)
    whole = SUMS.apply_chat_template(said["messages"], return_dict=False)
    assert whole == [*prompt, *completion, *SUMS.encode("\n")]


def test_generation_stops_at_the_end_of_turn_and_end_of_text_tokens():
    assert tokenizers.stop_ids(SUMS) == (SUMS.convert_tokens_to_ids("<|im_end|>"),) == (SUMS.eos_token_id,)
    other = tokenizers.byte_level()
    other.eos_token = "<pad>"  # as in base models, whose chat template ends a turn with another token
    assert tokenizers.stop_ids(other) == (0, 2) and tokenizers.end_of_turn(other) == 2
    assert tokenizers.stop_ids(TRAINED) == (TRAINED.eos_token_id,)
    assert tokenizers.stop_ids(FALLING_BACK) == ()
    with pytest.raises(ValueError, match="no end-of-text token"):
        tokenizers.end_of_turn(FALLING_BACK)


def test_what_ends_a_part_of_a_turn_does_not_end_the_turn():
    """As in Kimi K3, whose turns close a thought and a response with the same token."""
    tokens = tokenizers.byte_level()
    tokens.add_special_tokens({"eos_token": "</s>", "additional_special_tokens": ["<|close|>", "<|end_of_msg|>"]})
    tokens.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}{{ m.reasoning_content }}<|close|>think "
        "{% endif %}{{ m.content }}<|close|>response<|end_of_msg|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    end = tokens.convert_tokens_to_ids("<|end_of_msg|>")
    assert tokenizers.end_of_turn(tokens) == end
    assert tokenizers.stop_ids(tokens) == tuple(sorted((end, tokens.eos_token_id)))
    said = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    _, learnt = tokenizers.supervised(tokens, {"messages": [{"role": "user", "content": "a"}, said]})
    assert tokens.decode(learnt) == "c<|close|>think b<|close|>response<|end_of_msg|>"


def test_without_a_template_a_prompt_is_plain_text():
    assert tokenizers.supervised(TRAINED, ROW) == (
        TRAINED.encode("25+16"),
        [*TRAINED.encode("41"), TRAINED.eos_token_id],
    )
    with pytest.raises(ValueError, match="has no chat template"):
        template.prompt(TRAINED, {"messages": [{"role": "user", "content": "1"}]})


def test_errors_raised_by_a_template_give_a_one_line_error():
    strict = tokenizers.byte_level()
    strict.chat_template = "{{ raise_exception('roles must\\nalternate') }}"
    with pytest.raises(ValueError, match=r"the chat template refuses them \(roles must alternate\)"):
        template.prompt(strict, ROW)


@pytest.mark.parametrize(
    "function, row, message",
    [
        (template.prompt, {"question": "1"}, "needs either 'prompt' or 'messages', got the fields \\['question'\\]"),
        (template.prompt, {"messages": [{"role": "user"}]}, "a message needs a role and a content"),
        (tokenizers.supervised, {"prompt": "1"}, "needs a completion, got the fields \\['prompt'\\]"),
    ],
)
def test_bad_rows_are_refused(function, row, message):
    with pytest.raises(ValueError, match=message):
        function(SUMS, row)


@pytest.mark.parametrize(
    "path, message",
    [
        ("/no/such/folder", "no such folder"),
        ("a/b/c", "no such folder"),
        ("no-such/model", "no such folder here, and no complete copy in the hub"),
    ],
)
def test_a_missing_tokenizer_is_refused(path, message):
    with pytest.raises(ValueError, match=message) as error:
        tokenizers.load(path)
    assert "\n" not in str(error.value)


def test_a_damaged_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer in the folder .*; it needs tokenizer.json"):
        tokenizers.load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer in the folder .*; merge its adapters: areax convert"):
        tokenizers.load(tmp_path)
    tokenizers.save(SUMS, tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match="tokenizer.json: damaged or half-written") as error:
        tokenizers.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "vocab.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "{"])
def test_a_damaged_file_beside_a_tokenizer_is_named(tmp_path, name, text):
    tokenizers.save(SUMS, tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"^{tmp_path}/{name}: damaged or half-written") as error:
        tokenizers.load(tmp_path)
    assert "\n" not in str(error.value)


def test_importing_the_module_does_not_load_transformers():
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
def test_the_tokenizer_class_is_the_one_of_transformers(tmp_path, family):
    tokenizers.save(SUMS, tmp_path)
    if family:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert type(tokenizers.load(tmp_path)) is type(AutoTokenizer.from_pretrained(tmp_path))


def test_a_damaged_config_is_named(tmp_path):
    tokenizers.save(SUMS, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type"')
    with pytest.raises(ValueError, match="config.json: damaged"):
        tokenizers.load(tmp_path)


@pytest.mark.slow
def test_two_runs_in_a_notebook_load_their_tokenizers_at_the_same_time(tmp_path):
    tokenizers.save(tokenizers.byte_level(), tmp_path)
    program = (
        "import concurrent.futures, sys\n"
        "from areax.adapters import tokenizer\n"
        "with concurrent.futures.ThreadPoolExecutor(4) as pool:\n"
        "    print([len(tokens) for tokens in pool.map(tokenizer.load, sys.argv[1:] * 4)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == f"{[288] * 4}\n", done.stderr


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_full_disk_is_an_error_with_a_folder(name, tmp_path):
    """The first is written in Rust, whose errors are no OSError."""
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as error:
        tokenizers.save(tokenizers.byte_level(), tmp_path)
    assert error.value.filename == str(tmp_path)


@pytest.mark.parametrize("said", [{}, {"model": 5}, {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}])
def test_a_tokenizer_json_of_another_form_is_refused(said, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [], **said}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match="cannot be loaded: (Model missing|data did not match|Token `x`)"):
        tokenizers.load(tmp_path)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "program, words",
    [
        (LOOP, "within 1 s and 1024 MiB"),
        (f"{{% for m in messages if m.role == 'assistant' %}}{LOOP}{{% endfor %}}", "within 1 s and 1024 MiB"),
        ("{{ 7 ** (7 ** 9) }}", "within 1 s"),  # in one operation, while it is compiled
        ("{{ messages|length ** (9 ** (9 ** messages|length)) }}", "within 1 s"),
        ("{{ 'a' * 3000000000 }}", "1024 MiB"),
        ("{{ messages[0].role.center(3000000000) }}", "1024 MiB"),
        ("{% set x = 'a' * 2000 %}{% for i in range(9999) %}{{ x }}{% endfor %}", "at most 1,000,000"),
        ("{{ 'ab' * (1000000 if messages|length > 1 else 1) }}", "at most 1,000,000"),
    ],
)
def test_a_chat_template_that_does_not_end_or_grows_is_refused(program, words, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers.template_trial, "SECONDS", 1)
    tokenizers.save(tokenizers.character("abc"), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(program)
    with pytest.raises(ValueError, match=words):
        tokenizers.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "merges.txt", "chat_template.jinja"])
def test_a_file_of_a_tokenizer_that_is_none_is_refused(name, tmp_path):
    tokenizers.save(tokenizers.character("abc"), tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}: a tokenizer's files must be regular files of at most 256 MiB"):
        tokenizers.load(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="must be regular files"):
        tokenizers.load(tmp_path)
