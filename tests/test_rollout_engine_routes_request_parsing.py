"""Parsing of /generate bodies: defaults, batches, and errors that name the field."""

import pytest

from areax.rollout.engine.request import Grammar, Sampling
from areax.rollout.engine.routes import request_parsing


def generate(**body):
    return request_parsing.generate({"input_ids": [1, 2, 3], **body}, None, 64)


def test_default_values():
    ask = generate()
    (request,) = ask.requests
    assert request.prompt == (1, 2, 3) and request.sampling == Sampling()
    assert ask.single and not ask.stream and ask.logprobs == (False,) and ask.n == 1


def test_null_means_the_default():
    names = ("temperature", "top_p", "top_k", "min_p", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "n")
    params = dict.fromkeys((*names, "sampling_seed", "regex", "frequency_penalty"))
    assert generate(sampling_params=params, return_logprob=None, rid=None).requests[0].sampling == Sampling()


def test_null_max_new_tokens_means_the_remaining_context():
    assert generate(sampling_params={"max_new_tokens": None}).requests[0].sampling.max_new_tokens == 61


def test_samples_of_a_prompt_are_adjacent_and_have_different_seeds():
    params = {"n": 3, "sampling_seed": 2**63 - 2}
    ask = request_parsing.generate({"input_ids": [[1], [2, 2]], "sampling_params": params}, None, 64)
    assert [request.prompt for request in ask.requests] == [(1,)] * 3 + [(2, 2)] * 3
    assert [request.sampling.seed for request in ask.requests] == [2**63 - 2, 2**63 - 1, 2**63] * 2
    assert len({request.rid for request in ask.requests}) == 6 and not ask.single


def test_negative_seeds_wrap_around():
    assert generate(sampling_params={"sampling_seed": -1}).requests[0].sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    "rid, prompts, n, names",
    [
        ("a", [1], 1, ["a"]),
        ("a", [1], 2, ["a_0", "a_1"]),
        ("a", [[1], [2]], 1, ["a_0", "a_1"]),
        ("a", [[1], [2]], 2, ["a_0_0", "a_0_1", "a_1_0", "a_1_1"]),
        (["x", "y"], [[1], [2]], 1, ["x", "y"]),
        (["x", "y"], [[1], [2]], 2, ["x_0", "x_1", "y_0", "y_1"]),
    ],
)
def test_request_ids(rid, prompts, n, names):
    ask = request_parsing.generate({"input_ids": prompts, "rid": rid, "sampling_params": {"n": n}}, None, 64)
    assert [request.rid for request in ask.requests] == names


def test_fields_that_a_batch_may_set_for_each_prompt():
    body = {
        "input_ids": [[1, 2], [3, 4]],
        "sampling_params": [{"temperature": 0}, {"top_k": 5}],
        "return_logprob": [True, False],
        "logprob_start_len": [1, 0],
        "top_logprobs_num": [2, 3],
    }
    one, two = request_parsing.generate(body, None, 64).requests
    assert (one.sampling.temperature, two.sampling.top_k) == (0.0, 5)
    assert (one.input_logprobs_from, one.top_logprobs) == (1, 2)
    assert (two.input_logprobs_from, two.top_logprobs) == (None, 0)  # no log-probabilities are requested for it


@pytest.mark.parametrize("start, inputs", [(-1, None), (0, 0), (2, 2), (3, None)])
def test_where_input_logprobs_start(start, inputs):
    assert generate(return_logprob=True, logprob_start_len=start).requests[0].input_logprobs_from == inputs


@pytest.mark.parametrize(
    "name, value",
    [
        ("structural_tag", "{}"),
        ("stop_regex", "a"),
        ("beam_width", 4),
        ("custom_params", {"a": 1}),
        ("no_stop_trim", True),
        ("skip_special_tokens", False),
        ("no_such_parameter", 1),
    ],
)
def test_unsupported_sampling_parameters_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        generate(sampling_params={name: value})


def test_penalties_and_grammars():
    given = {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"7": -100}}
    (request,) = generate(sampling_params=given).requests
    assert request.sampling == Sampling(
        frequency_penalty=0.5, presence_penalty=-1.0, repetition_penalty=1.1, logit_bias=((7, -100.0),)
    )
    for kind, value in (("json_schema", "{}"), ("regex", "a+"), ("ebnf", "root ::= x"), ("choice", ["é"])):
        (request,) = generate(sampling_params={kind: value}).requests
        assert request.sampling.grammar == Grammar(kind, value if kind != "choice" else '["\\u00e9"]')


@pytest.mark.parametrize(
    "neutral",
    [
        {
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "regex": "",
            "choice": [],
            "logit_bias": {},
            "skip_special_tokens": True,
        }
    ],
)
def test_neutral_values_of_unsupported_parameters_are_accepted(neutral):
    assert generate(sampling_params=neutral).requests[0].sampling == Sampling()


@pytest.mark.parametrize(
    "name, value",
    [
        ("image_data", "cat.png"),
        ("input_embeds", [[0.0]]),
        ("token_ids_logprob", [1]),
        ("return_hidden_states", True),
        ("custom_logit_processor", "x"),
        ("session_params", {"id": "x"}),
    ],
)
def test_unsupported_features_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        generate(**{name: value})


def test_adapters_are_chosen_per_prompt():
    assert generate(lora_path="a").requests[0].adapter == "a"
    some = generate(input_ids=[[1], [2], [3]], lora_path=["a", None, "b"], sampling_params={"n": 2})
    assert [request.adapter for request in some.requests] == ["a", "a", "", "", "b", "b"]
    for wrong in (1, ["a", 1], ["a"], [["a"]]):
        with pytest.raises(ValueError, match="lora_path"):
            generate(input_ids=[[1], [2]], lora_path=wrong)


def test_routed_experts_are_returned_on_request():
    assert generate(return_routed_experts=True).requests[0].routed_experts
    assert not generate().requests[0].routed_experts


def test_fields_that_do_not_affect_results_are_ignored():
    generate(priority=3, log_metrics=False, no_logs=True, routed_dp_rank=0, extra_key="x")
    with pytest.raises(ValueError, match=r"return_logprobs: unknown field; did you mean return_logprob\?"):
        generate(return_logprobs=True)


@pytest.mark.parametrize(
    "body, rule",
    [
        ({"input_ids": None}, "text or as input_ids"),
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [[1], []]}, "at least one token"),
        ({"input_ids": [True]}, "input_ids: must be a list of token ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": None, "text": "hello"}, "no tokenizer"),
        ({"input_ids": None, "text": 5}, "text: must be"),
        ({"sampling_params": [{}, {}]}, "sampling_params: must be one value, or one for each of 1 prompts"),
        ({"sampling_params": {"n": 0}}, "n: must be from 1 to 1024, got 0"),
        ({"sampling_params": {"stream_interval": 0}}, "stream_interval: must be at least 1, got 0"),
        ({"sampling_params": {"top_k": 0}}, "top_k: must be -1 .off. or at least 1"),
        ({"sampling_params": {"temperature": float("nan")}}, "temperature: must be a finite number"),
        ({"sampling_params": {"temperature": True}}, "temperature"),
        ({"sampling_params": {"stop": ["a", ""]}}, "stop: .* none empty"),
        (
            {"sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}},
            "max_new_tokens, which is 4, got 5",
        ),
        ({"return_logprob": "yes"}, "return_logprob: must be true or false"),
        ({"logprob_start_len": True}, "logprob_start_len: must be a whole number"),
        ({"stream": 1}, "stream"),
        ({"rid": ""}, "rid"),
        ({"rid": ["a", "b"]}, "rid: must be one string, or one for each of 1 prompts"),
    ],
)
def test_malformed_bodies_are_refused_in_one_line(body, rule):
    with pytest.raises(ValueError, match=rule) as raised:
        generate(**body)
    assert "\n" not in str(raised.value)
