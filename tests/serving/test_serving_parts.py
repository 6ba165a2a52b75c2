"""Server components without a server: keys, settings, stop strings, templates, and the optional extra."""

import asyncio
import contextlib
import gc
import importlib.util
import json
import os
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import architectures, tiny
from transformers import GenerationConfig

import token_recycling as tr
from token_recycling import serving
from token_recycling.model.loading import Loaded
from token_recycling.serving import generation
from token_recycling.serving.api.common import config_of, written
from token_recycling.serving.conversation import AllowedTools, Called, Message, ToolCall
from token_recycling.serving.engine import Engine, Job, _Arrivals
from token_recycling.serving.errors import ApiError
from token_recycling.serving.generation import Generation
from token_recycling.serving.keys import find_key, parse_key, parse_keys
from token_recycling.serving.logprobs import chat_logprobs, completion_logprobs
from token_recycling.serving.output import Output, ScoredToken, StopTrimmer, whole
from token_recycling.serving.prompt import check_template, render_prompt
from token_recycling.serving.protocol import Request
from token_recycling.serving.settings import Settings

TEXTS = st.text("ab\n", max_size=30)


def test_keys_are_read_from_options_and_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("\ufeff# users\n\nann:one:with:colons\n  bob:two  \n")
    file.chmod(0o600)
    found = parse_keys(["zoe:three=="], file)
    assert [key.name for key in found] == ["zoe", "ann", "bob"]
    assert find_key(found, "Bearer one:with:colons").name == "ann"
    assert find_key(found, "bearer two").name == "bob"
    assert find_key(found, "Bearer three==").name == "zoe"
    assert find_key([parse_key("ann:one two")], "Bearer one two").name == "ann"
    assert parse_key("sk-one/two").name == "default"
    assert "three" not in repr(found)
    for wrong in (None, "", "Bearer", "Bearer ", "two", "Basic two", "Bearer Two", "Bearer bob:two"):
        assert find_key(found, wrong) is None


NAMELESS = (":secret", "ann:", "", "../up:secret", "a b:secret", "ann\n:x")
UNSENDABLE = ("schl\u00fcssel", "\N{SNOWMAN}", " one", "one\ttwo", "one\x00two")


@pytest.mark.parametrize("text", [*NAMELESS, *(f"ann:{secret}" for secret in UNSENDABLE)])
def test_invalid_keys_are_refused_without_repeating_them(text):
    """Keys without a name, or with characters that no client can send."""
    with pytest.raises(ValueError, match="API key") as caught:
        parse_key(text)
    assert not any(secret in str(caught.value) for secret in ("secret", *UNSENDABLE))


def test_keys_must_differ(tmp_path):
    (tmp_path / "keys").write_text("# none\n")
    twice = ["ann:one", "ann:two"], ["one", "two"], ["ann:one", "bob:one"], []
    for keys, word in zip(twice, ("ann", "default", "twice", "no API keys"), strict=True):
        with pytest.raises(ValueError, match=word):
            parse_keys(keys, None if keys else tmp_path / "keys")


def test_asyncio_does_not_report_the_error_of_an_abandoned_stream():
    reported = []

    async def leave():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: reported.append(context))
        arrivals, task = _Arrivals(), loop.create_future()
        arrivals.end_with([task])
        task.set_exception(ValueError("after the client has left"))
        for _ in range(3):
            await asyncio.sleep(0)
        del arrivals, task
        gc.collect()

    asyncio.run(leave())
    assert not reported


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("mode", [0o600, 0o440])
def test_key_file_readable_by_others_causes_a_warning(tmp_path, caplog, mode):
    """systemd credentials and secrets of Docker and Kubernetes have these modes, so the server must still start."""
    file = tmp_path / "keys"
    file.write_text("ann:hidden\n")
    file.chmod(mode)
    assert [key.name for key in parse_keys([], file)] == ["ann"]
    assert (f"chmod 600 {file}" in caplog.text) == (mode != 0o600)
    assert "hidden" not in caplog.text


ALTERNATES = (
    "{% for m in messages %}{% if loop.index > 1 and loop.previtem.role == m.role %}"
    "{{ raise_exception('no ' ~ m.role ~ ' at ' ~ loop.index) }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def test_messages_are_merged_for_templates_whose_roles_alternate():
    """A call is never dropped: if the template rejects it, the error is that of the conversation as sent."""
    tokenizer, roles = tiny.tokenizer(), ("user", "user", "assistant", "assistant", "system")
    tokenizer.chat_template = ALTERNATES
    messages = [Message(role=role, content=text) for role, text in zip(roles, "abcde", strict=True)]
    shown = tokenizer.decode(render_prompt(tokenizer, messages)[0])
    assert shown == "system: e\nuser: a\n\nb\nassistant: c\n\nd\n"
    tokenizer.chat_template = ALTERNATES + "{% if messages[-1].role == 'system' %}{{ raise_exception('?') }}{% endif %}"
    shown = tokenizer.decode(render_prompt(tokenizer, messages[-1:])[0])
    assert shown == "system: e\nuser: \n", "some templates need a user"
    tokenizer.chat_template = ALTERNATES
    messages[2].tool_calls = [ToolCall(function={"name": "look"})]
    with pytest.raises(ApiError, match="no user at 2"):
        render_prompt(tokenizer, messages)


@given(st.lists(TEXTS, max_size=8), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_stop_trimmer_cuts_pieces_where_it_cuts_the_whole_text(pieces, stops):
    whole = "".join(pieces)
    # The stop string that is complete first ends the text, as it ended the generation.
    ends = [(whole.index(stop) + len(stop), whole.index(stop)) for stop in stops if stop in whole]
    text = StopTrimmer(stops)
    shown = "".join(map(text.push, pieces))
    assert whole.startswith(shown)
    shown += text.flush()
    if not ends:
        assert shown == whole
    else:
        assert all(stop not in shown for stop in stops)
        assert shown == whole[: len(shown)]
        assert len(shown) <= min(start for _, start in ends)


def test_stop_trimmer_holds_back_no_more_than_needed():
    text = StopTrimmer(["\n\n"])
    assert [text.push(piece) for piece in ("one", "\n", "two\n", "\nthree", "four")] == ["one", "", "\ntwo", "", ""]
    assert text.flush() == ""


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_shorter_of_two_stop_strings_with_a_common_prefix_matches(stops):
    for pieces in (["xabc"], [*"xabc"]):
        text = StopTrimmer(stops, include=True)
        assert ("".join(map(text.push, pieces)), text.matched) == ("xab", "ab")


class Letters:
    """A tokenizer of letters with two special tokens."""

    all_special_ids = (0, 5)

    def decode(self, tokens, **_):
        return "".join("" if token in (0, 5) else chr(ord("a") + token) for token in tokens)


@pytest.mark.parametrize("limit", [4, 9])
@pytest.mark.parametrize(
    ("ends", "last"), [(0, 0), (5, 5), ([0, 5], 0), ([5, 0], 5), (5, 0), (None, 0), (1, 1), ([0, 1], 1)], ids=str
)
def test_output_ends_at_any_eos_token(ends, last, limit):
    """The EOS token is neither shown nor scored, special or not, and ends the output even at the token limit."""
    output = Output(Letters(), GenerationConfig(eos_token_id=ends, max_new_tokens=limit))
    answer = whole([*(output.push([ScoredToken(token, -1.0)]) for token in (7, 8, 9, last)), output.end()])
    ended = last in (ends if isinstance(ends, list) else [ends])
    assert answer.of("text") == "hij"
    assert answer.finish_reason == ("stop" if ended or limit > 4 else "length")
    assert [scored.token for scored in answer.tokens] == ([7, 8, 9] if ended else [7, 8, 9, last])
    assert output.tokens == 4
    own = ends if isinstance(ends, list) else [] if ends is None else [ends]
    assert (Request(stop_token_ids=[7]).ends(ends, 9), Request().ends(ends, 9)) == ([*own, 7], ends)


class MarkedLetters:
    """A tokenizer of two letters and a special token."""

    def decode(self, tokens, skip_special_tokens, **_):
        return "".join("ab*"[token] for token in tokens if token < 2 or not skip_special_tokens)


@given(
    st.lists(st.integers(0, 2), max_size=8), st.lists(st.text("ab*", min_size=1, max_size=3), min_size=1, max_size=2)
)
def test_stop_string_with_or_without_special_tokens_ends_the_output(tokens, stops):
    """It ends with the token that completes the stop string, even at the token limit."""
    config = GenerationConfig(eos_token_id=None, stop_strings=stops, max_new_tokens=max(1, len(tokens)))
    output, deltas, text = Output(MarkedLetters(), config), [], ""
    for token in tokens:
        deltas.append(output.push([ScoredToken(token)]))
        text += "ab*"[token]
        assert output.stopped == any(stop in text or stop in text.replace("*", "") for stop in stops)
        if output.stopped:
            break
    answer = whole([*deltas, output.end()])
    assert (answer.stop_string in stops) == output.stopped
    assert answer.finish_reason == ("stop" if output.stopped or not tokens else "length")
    assert all(stop not in answer.of("text") for stop in stops)


@torch.no_grad()
def test_prompt_scores_do_not_depend_on_chunks(monkeypatch):
    model, top = tiny.llama(), 3
    monkeypatch.setattr(generation, "_CHUNK", 4)
    for length in range(1, 11):
        ids = tiny.prompt(0, length)
        rows = torch.log_softmax(model(ids).logits[0], dim=-1)
        scored = generation.scored_prompt(model, ids, top)
        assert [one.token for one in scored] == ids[0].tolist()
        assert scored[0].logprob is None
        for row, token in zip(rows, scored[1:], strict=False):
            assert token.logprob == pytest.approx(float(row[token.token]), abs=1e-4)
            assert [one for one, _ in token.top] == row.topk(top).indices.tolist()


def test_logprob_recorder_frees_the_distributions_of_scored_tokens():
    """A distribution has the size of the vocabulary."""
    model, config = tiny.llama(vocab_size=300), GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    wanted = Generation(tiny.prompt(0, 5), config, partial(Output, tiny.tokenizer(), config), logprobs=2)
    for generate in (model.generate, partial(tr.generate, model)):
        output = wanted.new_output()
        arguments = wanted.arguments(tiny.tokenizer(), model.device, output, lambda deltas: None, lambda: None)
        generate(**arguments)
        (recorder,) = arguments["logits_processor"]
        assert (output.tokens, len(recorder._rows)) == (6, 0)
    for token in (0, 1):  # JSON has no infinity
        recorder(torch.zeros(1, 1), torch.tensor([[0.0, -torch.inf, -torch.inf]]))
        scored = recorder.scored(1, token)
        assert min(scored.logprob, *dict(scored.top).values()) > -torch.inf


class Marked:
    """A tokenizer of SentencePiece's words: alone, a token has no space before it."""

    def decode(self, tokens, **_):
        return ("a", "a", "b")[tokens[0]]

    def convert_ids_to_tokens(self, token):
        return ("\u2581a", "a", "\u2581b")[token]


def test_log_probabilities_of_tokens_with_equal_texts():
    """The most probable one counts. Only the text's first token is written without the space before it."""
    top = [(0, -1.0), (2, -2.0), (1, -3.0)]
    scored = [ScoredToken(token, -3.0, top, begins_text=token == 0) for token in (0, 2)]
    wanted = [{"a": -1.0, "b": -2.0}, {" a": -1.0, " b": -2.0, "a": -3.0}]
    assert completion_logprobs(Marked(), scored, [0, 1], 3)["top_logprobs"] == wanted
    for entry, texts in zip(
        chat_logprobs(Marked(), scored)["content"], (["a", "a", "b", "a"], [" b", " a", " b", "a"]), strict=True
    ):
        assert [one["token"] for one in (entry, *entry["top_logprobs"])] == texts
        assert [bytes(one["bytes"]).decode() for one in (entry, *entry["top_logprobs"])] == texts


def test_missing_extra_is_named(monkeypatch):
    serving.check_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"serving needs the extra 'serving', got no fastapi, .*pip install"):
        serving.create_app  # noqa: B018


WRONG = [{name: 0} for name in ("max_prompt_tokens", "max_new_tokens", "max_requests", "save_every")]


@pytest.mark.parametrize(
    "settings",
    [*WRONG, {"port": 65_536}, {"timeout": 0}, {"timeout": float("nan")}, {"max_body": -1}, {"isolation": "per-key"}],
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ValueError, match="|".join(settings)):
        Settings(keys=parse_keys(["metrics:one"]), **settings)
    assert Settings(port=65_535, save_every=0.001).port == 65_535, "bounds are inclusive"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content", "TemplateSyntaxError"),
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{{ messages[7].content.strip() }}", "UndefinedError"),
        ("", None),
        ("{% if false %}a{% endif %}", "no token"),
    ],
)
def test_broken_template_is_refused_at_start(template, said):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    if said is None:
        check_template(tokenizer)
        return
    with pytest.raises(ValueError, match=said) as caught:
        Engine(Loaded(tiny.llama(vocab_size=300), tokenizer), Settings())
    assert "--chat-template" in str(caught.value)


def test_default_output_length_is_the_context_length():
    model = architectures.model_of(architectures.named("mpt"))
    del model.config.max_position_embeddings
    with contextlib.closing(Engine(Loaded(model, tiny.tokenizer()), Settings())) as engine:
        assert config_of(Request(), engine).max_new_tokens == 256


@pytest.mark.parametrize("field", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"min_p": 0.0}], ids=str)
def test_greedy_request_sets_no_sampling_options(field):
    """transformers would log a warning about them."""
    with contextlib.closing(Engine(Loaded(tiny.llama(), tiny.tokenizer()), Settings())) as engine:
        config_of(Request(temperature=0, **field), engine).validate(strict=True)
        config = config_of(Request(temperature=1, **field), engine)
    assert {name: getattr(config, name) for name in field} == field


def test_event_data_has_no_line_separators():
    """See modelcontextprotocol/python-sdk#1356: httpx's `iter_lines` splits at more characters than line feeds."""
    said = {"text": "".join(map(chr, range(0x3000))) + "\U0001f600"}
    name, data, *rest = written("delta", said).decode().splitlines()
    assert (name, rest) == ("event: delta", [""])
    assert json.loads(data.removeprefix("data: ")) == said


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"a": "é"}, {"a": "é"}),
        ('{"a": "é"}', {"a": "é"}),
        (None, {}),
        ("null", {}),
        ("", {}),
        (["é", 1.0], '["é", 1.0]'),
        ('{"a": "é', '{"a": "é'),
        ('{"a": NaN}', '{"a": NaN}'),
    ],
)
def test_arguments_of_calls_are_objects_or_the_text_of_the_model(sent, read):
    assert Called.model_validate({"name": "look", "arguments": sent}).arguments == read


def test_every_output_of_a_failed_request_ends_with_its_error():
    """Also one that begins after the request has ended: its future may be the first to fail."""
    job = Job()
    job.failure = ApiError(400, "no")
    job.cancel()
    with pytest.raises(ApiError, match="no"):
        job.check()
    assert job.outcome is None


def test_refusal_of_an_earlier_answer_is_its_content_if_there_is_no_other():
    for content, read in ((None, "no"), ("", "no"), ("yes", "yes")):
        answer = {"role": "assistant", "content": content, "refusal": "no"}
        assert Message.model_validate(answer).content == read


def test_only_functions_are_among_the_allowed_tools():
    tools = [{"type": "function", "name": "look"}, {"type": "mcp", "name": "other"}]
    assert AllowedTools.model_validate({"type": "allowed_tools", "tools": tools}).names == ["look"]


def test_error_about_a_field_names_it_as_the_client_does():
    for field, name in (("messages", "input"), ("tools", "tools")):
        error = ApiError(400, f"{field}: too long", param=field).renamed("messages", "input")
        assert (str(error), error.param) == (f"{name}: too long", name)
