"""Grammars in the engine: every answer obeys, neighbours keep their bits, and a grammar survives a retraction."""

import json
import random
import re
import sys

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import tiny
import tiny_families
import wordpieces
from test_rollout_engine_programs_penalties import retracted_twice

from areax import models
from areax.adapters import tokenizer
from areax.rollout.chat.fields import Refused
from areax.rollout.engine import grammar
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.grammar import Grammars
from areax.rollout.engine.request import Grammar, Request, Sampling

BYTES = tokenizer.byte_level()
END = BYTES.eos_token_id
CONFIG = models.config_from_hf(
    dict(
        model_type="qwen3", vocab_size=len(BYTES) + 5, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=20, tie_word_embeddings=True, eos_token_id=END,
        max_position_embeddings=1024,
    )
)  # fmt: skip
WEIGHTS = tiny.weights(models.table(CONFIG), 0.16, 0)
GRAMMARS = Grammars(BYTES, CONFIG.vocab, CONFIG.eos)


def decode(ids):
    return BYTES.decode(ids, skip_special_tokens=True)


def make(**more):
    more = {"grammars": GRAMMARS, "decode": decode, **more}
    return Engine(CONFIG, WEIGHTS, slots=16, context=1024, steps=4, **more)


@pytest.fixture(scope="module")
def engine():
    with make() as engine:
        yield engine


def ask(rid, kind="", text="", more=600, **sampling):
    held = Grammar(kind, text) if kind else None
    prompt = tuple(np.random.default_rng(len(str(rid))).integers(8, len(BYTES), 9).tolist())
    return Request(str(rid), prompt, Sampling(**{"max_new_tokens": more, "seed": 7, "grammar": held, **sampling}))


def answers(engine, requests):
    """The texts, all of which the grammar ended."""
    done = engine.generate(requests)
    assert all(one.finish == {"type": "stop", "matched": END} for one in done), [one.finish for one in done]
    assert all(one.tokens[-1] == END and END not in one.tokens[:-1] for one in done)
    return [one.text for one in done]


# -- schemas -----------------------------------------------------------------------------------------


def schema(rng: random.Random, depth=2):
    """A random JSON schema, with bounds that let a random model come to an end."""
    kinds = ["string", "pattern", "integer", "number", "boolean", "null", "enum", "const", "any of"]
    nested = ["object", "array"] * (0, 4, 9)[depth]
    kind = rng.choice(nested if depth == 2 else kinds + nested)
    low, length = rng.randint(-50, 50), rng.randint(0, 3)
    if kind == "object":
        names = rng.sample(["a", "b c", 'q"', "é", "long_name", ""], rng.randint(0, 3))
        return {
            "type": "object",
            "properties": {name: schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        return {
            "type": "array", "items": schema(rng, depth - 1), "minItems": rng.randint(0, 2),
            "maxItems": rng.randint(2, 3),
        }  # fmt: skip
    if kind == "any of":
        return {"anyOf": [schema(rng, 0), schema(rng, 0)]}
    return {
        "string": {"type": "string", "minLength": length, "maxLength": length + rng.randint(0, 4)},
        "pattern": {"type": "string", "pattern": rng.choice(["^[a-f]{2,5}$", r"^\d{3}-\d{2}$", "^(on|off)?$"])},
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 900)},
        "number": {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(1, 90)},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": rng.sample(["x", 'y"\n', "€", 1, 2.5, None, True], 3)},
        "const": {"const": rng.choice(["c", 3, {"k": [1, "two"]}])},
    }[kind]


@pytest.mark.slow
def test_random_schemas_are_obeyed_by_a_random_model(engine):
    schemas = [schema(random.Random(seed)) for seed in range(200)]
    held = [json.dumps(one) for one in schemas]
    texts = answers(engine, [ask(i, "json_schema", text, seed=i) for i, text in enumerate(held)])
    for wanted, text in zip(schemas, texts, strict=True):
        value = json.loads(text)
        jsonschema.validate(value, wanted, jsonschema.Draft202012Validator)
        assert "  " not in re.sub(r'"(\\.|[^"\\])*"', '""', text)  # one space at most between tokens of JSON
    assert len({*texts}) > 120 and sum(map(len, texts)) > 4000  # they are neither all equal nor all empty


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"[a-c]{3,9}x?", r"^\d{4}-\d{2}$", "(yes|no) or (yes|no)", r'"[^"]{2,8}"', "é+🙂"])
def test_a_regex_matches_the_whole_text(engine, pattern):
    requests = [ask(f"{pattern}{i}", "regex", pattern, seed=i, top_k=(-1, 3)[i % 2]) for i in range(4)]
    assert all(re.fullmatch(pattern, text, re.ASCII) for text in answers(engine, requests))


@pytest.mark.slow
def test_ebnf(engine):
    text = """
    root  ::= "sum(" item ("," item)* ")"   # GBNF
    item  ::= [0-9]{1,3} | root
    """
    for made in answers(engine, [ask(i, "ebnf", text, seed=i) for i in range(8)]):
        while re.search(r"sum\(\d{1,3}(,\d{1,3})*\)", made):
            made = re.sub(r"sum\(\d{1,3}(,\d{1,3})*\)", "7", made)
        assert made == "7"
    (made,) = answers(engine, [ask("lark", "ebnf", 'start: "a" NUMBER\nNUMBER: /[0-9]/')])
    assert re.fullmatch(r"a\d", made)


@pytest.mark.slow
def test_choices(engine):
    words = ["é🙂", 'a"\nb', "abc", "ab"]
    texts = answers(engine, [ask(i, "choice", json.dumps(words), seed=i) for i in range(12)])
    assert {*texts} <= {*words} and len({*texts}) > 1


def test_logp_are_those_of_the_whole_distribution(engine):
    """They equal those of the same tokens in a prompt."""
    (one,) = engine.generate([ask("a", "regex", "[a-z]{8}")])
    prompt = (*ask("a").prompt, *one.tokens)
    scored = Request("b", prompt, Sampling(max_new_tokens=0), input_logprobs_from=9)
    (again,) = engine.generate([scored])
    np.testing.assert_allclose(one.logp, again.input_logp, atol=2e-5)
    assert max(one.logp) < -0.5 and ask("a", "regex", "a").sampling.constrained and not ask("a").sampling.constrained


# -- with others -------------------------------------------------------------------------------------


def same(a, b):
    return a.tokens == b.tokens and a.logp == b.logp and a.top == b.top


@pytest.mark.slow
def test_neighbours_keep_their_bits(engine):
    free = [
        ask(f"free {i}", more=40, temperature=(1.0, 0.0)[i % 2], top_p=(1.0, 0.9)[i % 3 == 2], ignore_eos=True)
        for i in range(6)
    ]
    held = [ask(f"held {i}", "regex", "[a-z]{20,60}", seed=i) for i in range(6)]
    alone = [engine.generate([one])[0] for one in free + held]
    dispatches = engine.stats()["dispatches"]
    together = engine.generate([one for pair in zip(free, held, strict=True) for one in pair])
    assert all(map(same, alone[:6], together[::2])) and all(map(same, alone[6:], together[1::2]))
    # a grammar takes one token a dispatch, others four
    assert max(len(one.tokens) for one in together[1::2]) <= engine.stats()["dispatches"] - dispatches


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_moe", "gemma2"])
def test_a_waiting_slot_keeps_its_state(family):
    """Of layers with states too: alone each token is a dispatch of its own; beside others three steps follow it."""
    config = tiny_families.config(family, vocab_size=len(BYTES), eos_token_id=END)
    weights, grammars = tiny.weights(models.table(config), 0.2), Grammars(BYTES, config.vocab, config.eos)
    free = [ask(f"free {i}", more=60, ignore_eos=True, seed=i) for i in range(2)]
    held = [ask(f"held {i}", "regex", "[a-z]{9,20}", more=60, seed=i, presence_penalty=1.0) for i in range(2)]
    with Engine(config, weights, slots=4, context=128, steps=4, grammars=grammars, decode=decode) as engine:
        alone = [engine.generate([one])[0] for one in free + held]
        together = engine.generate([free[0], held[0], held[1], free[1]])
    assert all(map(same, [alone[0], alone[2], alone[3], alone[1]], together))


@pytest.mark.slow
def test_a_grammar_survives_a_retraction():
    text = json.dumps({"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 12, "maxItems": 12})
    request = ask("r", "json_schema", text, frequency_penalty=0.6, repetition_penalty=1.3)
    with make() as engine:
        (whole,) = engine.generate([request])
        engine.flush()
        done = retracted_twice(engine, request, (9, 23))
    assert done.retractions == 2 and done.tokens == whole.tokens and done.finish == whole.finish
    assert len(json.loads(done.text)) == 12
    np.testing.assert_allclose(done.logp, whole.logp, atol=2e-5)


def test_how_a_text_ends(engine):
    (cut,) = engine.generate([ask("cut", "regex", "[ab]{30}", more=7)])
    assert cut.finish == {"type": "length", "length": 7} and re.fullmatch("[ab]{7}", cut.text)
    short, least, forced = engine.generate(
        [
            ask("short", "regex", "a*", logit_bias=((END, 100.0),)),
            ask("least", "regex", "a*", min_new_tokens=12, logit_bias=((END, 100.0),)),
            ask("forced", "regex", "aaa", min_new_tokens=12),
        ]
    )
    assert (short.text, least.text, forced.text) == ("", "a" * 12, "aaa")
    word, stop = engine.generate(
        [
            ask("word", "regex", "[ab]{5}b", stop=("b",)),
            ask("stop", "regex", "a{3,9}", stop_token_ids=(BYTES.encode("z")[0],), logit_bias=((END, -100.0),)),
        ]
    )
    assert "b" not in word.text and word.finish["matched"] in ("b", END)
    assert re.fullmatch("a{3,9}", stop.text)  # where the grammar may end, any stop id may


# -- refusals ----------------------------------------------------------------------------------------

WRONG = [
    ("json_schema", "{", "Expecting"),
    ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}', "Unsatisfiable"),
    ("json_schema", '{"$ref": "#/$defs/none"}', "does not exist"),
    ("json_schema", '{"$ref": "http://127.0.0.1:9/x"}', "not present"),
    ("json_schema", "[" * 100_000, "nested too deeply"),
    ("json_schema", '"' + "x" * 2**17 + '"', "must have at most 131072 characters"),
    ("ebnf", "#" * (2**14 + 1), "must have at most 16384 characters"),
    ("regex", "a(", "unclosed group"),
    ("regex", "a(?=b)", "look-ahead"),
    ("ebnf", "root = x", "Expected ::="),
    ("ebnf", "root ::= x", "Rule 'x' not found"),
]


@pytest.mark.parametrize("kind, text, words", WRONG, ids=[f"{kind} {text:.20}" for kind, text, _ in WRONG])
def test_wrong_grammars_are_refused_in_one_line(engine, kind, text, words):
    for _ in range(2):  # a failure is kept too
        with pytest.raises(Refused) as refused:
            engine.generate([ask("wrong", kind, text)])
        message = str(refused.value)
        assert message.startswith(f"{kind}: ") and words in message and "\n" not in message and len(message) < 400


def test_without_the_package_or_a_tokenizer(monkeypatch):
    with make(grammars=None) as engine, pytest.raises(ValueError, match="needs a tokenizer"):
        engine.generate([ask("a", "regex", "a")])
    with pytest.raises(ValueError, match="grammars must be for the model's 293 tokens, got 288"):
        make(grammars=Grammars(BYTES, len(BYTES)))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Refused, match=r"regex: grammars need llguidance.*pip install 'areax\[grammar\]'"):
        Grammars(BYTES, CONFIG.vocab).compile(Grammar("regex", "a"))


LARK = """
?start: value
?value: array | SIGNED_NUMBER -> number | "null" -> null
array: "[" [value ("," value)*] "]"
%import common.SIGNED_NUMBER
"""  # the form of outlines.grammars


@pytest.mark.parametrize(
    "text",
    [
        LARK,
        LARK.replace("?start", "!start"),
        LARK.replace("?start", "start[capture]"),
        LARK.replace("?start", "start "),
    ],
)
def test_lark_is_read_however_its_first_rule_is_written(text):
    grammars = Grammars(BYTES, CONFIG.vocab)
    matcher = grammars.start(Grammar("ebnf", text))
    for id in BYTES.encode("[null,[-1.5]]", add_special_tokens=False):
        assert id in allowed(matcher)
        matcher.take(id)
    assert BYTES.eos_token_id in allowed(matcher)


@pytest.mark.parametrize(
    "text", ['root ::= starts | "a" restart\nstarts ::= "["\nrestart ::= [^:]', "root ::= x\nx ::= [a:\n]"]
)
def test_gbnf_is_not_taken_for_lark(text):
    Grammars(BYTES, CONFIG.vocab).compile(Grammar("ebnf", text))


def test_the_same_grammar_is_compiled_once():
    grammars = Grammars(BYTES, CONFIG.vocab)
    one, other = Grammar("regex", "ab", "regex"), Grammar("regex", "ab")
    assert not grammars.known(one)
    assert grammars.compile(one) is grammars.compile(other) and grammars.known(other)
    for i in range(grammar.KEPT):
        grammars.compile(Grammar("regex", "a" * i))
    assert not grammars.known(one)


# -- tokenizers and masks ----------------------------------------------------------------------------


def allowed(matcher):
    return np.flatnonzero(np.unpackbits(matcher.mask_M.view(np.uint8), bitorder="little")).tolist()


def test_character_tokenizers():
    characters = tokenizer.character('abc{}": ')
    grammars = Grammars(characters, len(characters))
    matcher = grammars.start(Grammar("regex", "ab?"))
    a, b = characters.encode("ab", add_special_tokens=False)
    assert allowed(matcher) == [a]
    matcher.take(a)
    assert allowed(matcher) == sorted([b, characters.eos_token_id])
    with pytest.raises(Refused, match="allows no token of this model's vocabulary"):
        grammars.compile(Grammar("regex", "z"))
    matcher = grammars.start(Grammar("regex", "az"))
    matcher.take(a)
    assert "allows no token" in matcher.problem


@pytest.mark.parametrize("made", [wordpieces.trained, wordpieces.falling_back], ids=lambda made: made.__name__)
def test_tokenizers_with_merges(made):
    """Random walks over tokens of several characters, and of parts of one."""
    words = made()
    grammars = Grammars(words, len(words) + 7, eos=[0])
    wanted = {"type": "array", "items": {"enum": ["Zürich", "数学", "ab cd"]}, "minItems": 2, "maxItems": 2}
    saved = 0
    for seed in range(9):
        matcher, tokens, rng = grammars.start(Grammar("json_schema", json.dumps(wanted))), [], random.Random(seed)
        while (token := rng.choice(allowed(matcher))) != 0:
            tokens.append(token)
            matcher.take(token)
        text = words.decode(tokens)
        jsonschema.validate(json.loads(text), wanted)
        saved += len(text.encode()) - len(tokens)
        assert matcher.mask_M.shape == (-(-(len(words) + 7) // 32),)
    assert saved > 0


def test_masks_of_all_widths():
    rng = np.random.default_rng(0)
    for V in (1, 31, 32, 33, 264):
        M = -(-V // 32)
        bits_SV = rng.integers(0, 2, (3, V))
        padded = np.pad(bits_SV, ((0, 0), (0, 32 * M - V)), constant_values=1).astype(np.uint8)
        mask_SM = np.packbits(padded, -1, "little").view(np.int32)
        logits_SV = rng.normal(size=(3, V)).astype(np.float32)
        where_S = np.array([True, False, True])
        made = jax.jit(grammar.masked)(jnp.asarray(logits_SV), jnp.asarray(mask_SM), jnp.asarray(where_S))
        np.testing.assert_array_equal(made, np.where((bits_SV == 1) | ~where_S[:, None], logits_SV, -np.inf))
