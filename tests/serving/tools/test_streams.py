"""Malformed calls of earlier turns, prefilled answers, and stop strings with tools."""

import re
import types
from functools import partial
from itertools import groupby
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.functions import TOOLS
from support.openai_answers import chat, streamed_chat
from transformers import GenerationConfig

from token_recycling.serving.output import Output, Piece, ScoredToken, call_piece, merged

THOUGHT = "<think>well</think>"
MALFORMED = ['{"at": ', "null", None, "[1]", "", "5", "not at all"]
READS_OBJECTS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}{% endfor %}\n{% endfor %}"
    "assistant: "
)


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("arguments", MALFORMED)
def test_malformed_arguments_of_earlier_calls_are_accepted(server, tokenizer, monkeypatch, arguments, objects):
    """The model generated them, and the client repeats them in every later request."""
    if objects:
        monkeypatch.setattr(tokenizer, "chat_template", READS_OBJECTS)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "no"},
    ]
    assert chat(server, messages=messages, max_tokens=2).choices
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "no"},
    ]
    assert server.post("/v1/responses", {"input": items, "max_output_tokens": 2}).status_code == 200


def test_malformed_arguments_are_rendered_verbatim(server, tokenizer, monkeypatch):
    """By templates that take text, and in prompted tools."""
    shown = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    written = '{"at": 1'
    call = {"function": {"name": "look", "arguments": written}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    for template in (shown + "{{ m.content }}{% endfor %}", "{% for m in messages %}{{ m.content }}{% endfor %}"):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        prompt = chat(server, messages=messages, max_tokens=1, logprobs=True).usage.prompt_tokens
        without = [messages[0], {"role": "assistant", "content": "b"}]
        longer = prompt - chat(server, messages=without, max_tokens=1).usage.prompt_tokens
        assert longer >= len(tokenizer(written)["input_ids"])


def test_prefilled_text_is_not_repeated(server, says):
    """The parser starts in the middle of the message."""
    for begun in ("so ", "so\n", "<think>we", "so"):
        says("ell</think>done" if "think" in begun else " done")
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": begun}]
        choice = chat(server, messages=messages, continue_final_message=True, max_tokens=40).choices[0]
        streamed = streamed_chat(server, messages=messages, continue_final_message=True, max_tokens=40)
        shown = "".join(event.choices[0].delta.content or "" for event in streamed)
        assert choice.message.content == shown
        assert choice.message.content.strip() == "done"
        thought = choice.message.model_extra.get("reasoning_content")
        assert thought == ("ell" if "think" in begun else None)
        blocks = server.post("/v1/messages", {"messages": messages, "max_tokens": 40}).json()["content"]
        assert blocks[-1]["text"].strip() == "done"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_partial_stop_string_at_the_end_is_shown(server, says, length):
    """With tools, a parser holds back text for a stop string; the text appears at the end."""
    says(f"{THOUGHT}It ends here")
    stop = "It ends here"[-length:] + "?"
    body = {"tools": TOOLS, "stop": [stop], "max_tokens": 60}
    assert chat(server, **body).choices[0].message.content == "It ends here"
    events = streamed_chat(server, **body)
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == "It ends here"


CALL = '<tool_call>{"name": "look", "arguments": {"at": "a well"}}</tool_call>'


@pytest.mark.parametrize(
    ("said", "text", "reason"),
    [
        (f"{THOUGHT}Done", "Done", "stop"),
        (f"{THOUGHT}Farewell, all", "Fare", "stop"),
        (CALL, None, "tool_calls"),
        (f"{THOUGHT}See:{CALL}{CALL}", "See:", "tool_calls"),
        (f"{CALL}Farewell, all", "Fare", "tool_calls"),
    ],
)
def test_stop_strings_ignore_reasoning_and_calls(server, says, said, text, reason):
    """See vllm-project/vllm#52393: reasoning repeats words of the prompt."""
    says(said)
    choice = chat(server, tools=TOOLS, stop=["well", "<end>"], max_tokens=250).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text, reason)
    assert len(choice.message.tool_calls or ()) == said.count("</tool_call>")
    assert (choice.message.model_extra.get("reasoning_content") == "well") == (THOUGHT in said)
    body = {"messages": [{"role": "user", "content": "a"}], "stop_sequences": ["well", "<end>"], "max_tokens": 250}
    message = server.post("/v1/messages", {**body, "tools": [{"name": "look", "input_schema": {}}]}).json()
    assert message["stop_reason"] == ("tool_use" if reason == "tool_calls" else "stop_sequence")
    assert (message["stop_sequence"] is None) == (reason == "tool_calls")


class Written:
    """A tokenizer with the listed tokens; a delimiter may end within a token."""

    all_special_ids: ClassVar = []
    all_special_tokens: ClassVar = []
    texts: ClassVar = [
        "a",
        "ab",
        "<think>",
        "b<think>a",
        "</think>",
        "b</think>a",
        "<tool_call>",
        CALL[11:-12],
        "</tool_call>",
    ]

    def decode(self, tokens, **_):
        return "".join(self.texts[token] for token in tokens)


PART = re.compile("(<think>).*?(?:</think>|$)|(<tool_call>).*?(?:</tool_call>|$)", re.DOTALL)
SAID = [[0], [1], [2, 1, 4], [3, 0, 1, 5], [2, 5], [6, 7, 8], [2, 0, 4, 6, 7, 8]]
STOPS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "ab", "ba", ">a", "a<", "look"]


@given(st.lists(st.sampled_from(SAID), max_size=4), st.lists(st.sampled_from(STOPS), min_size=1, max_size=2))
def test_stop_strings_match_only_tokens_outside_reasoning_and_calls(tokenizer, said, stops):
    """A stop string may be a delimiter or part of one."""
    config = GenerationConfig(eos_token_id=None, stop_strings=stops, max_new_tokens=99)
    output = Output(Written(), config, partial(tokenizer.get_response_parser, prefix=""))
    text = counted = ""
    for token in (token for part in said for token in part):
        output.push([ScoredToken(token)])
        before, text = len(text), text + Written.texts[token]
        parts = [*PART.finditer(text)]
        begun = parts and parts[-1].end() == len(text) and not text.endswith(("</think>", "</tool_call>"))
        counted += text[before : max(parts[-1].end(1), parts[-1].end(2))] if begun else text[before:]
        assert output.stopped == any(stop in counted or stop in PART.sub("", text) for stop in stops)
        if output.stopped:
            break


@pytest.mark.parametrize("line_ends", range(3))
def test_stop_strings_ignore_line_ends_after_reasoning(server, says, line_ends):
    says(THOUGHT + "\n" * line_ends + "Done\n\nwell")
    choice = chat(server, stop=["\n\n"], max_tokens=60).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Done", "stop")


def test_line_ends_in_the_token_that_ends_reasoning_match_no_stop_string(tokenizer):
    """Such as `>\\n\\n` of Qwen 2.5, whose tokens of `<think>` are those of other text."""
    pieces = types.SimpleNamespace(all_special_tokens=[], all_special_ids=[], decode=lambda ids, **_: "".join(ids))
    config = GenerationConfig(eos_token_id=None, stop_strings=["\n\n"], max_new_tokens=99)
    output = Output(pieces, config, partial(tokenizer.get_response_parser, prefix=""))
    stopped = []
    for piece in ("<think>", "well", "</think", ">\n\n", "yes", ".\n\n"):
        output.push([ScoredToken(piece)])
        stopped.append(output.stopped)
    assert stopped == [False] * 5 + [True]


@pytest.mark.parametrize("stop", [None, ["never"], ["<end>", "well"]])
def test_output_is_parsed_once(server, says, tokenizer, monkeypatch, stop):
    """Stop strings are searched in the parsed output."""
    parsers, usual = [], tokenizer.get_response_parser
    monkeypatch.setattr(tokenizer, "get_response_parser", lambda *a, **b: parsers.append(1) or usual(*a, **b))
    says(f"{THOUGHT}Done")
    for path in ("/v1/chat/completions", "/v1/messages"):
        before = len(parsers)
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40, "stop": stop}
        assert server.post(path, body).status_code == 200
        assert len(parsers) == before + 1


@pytest.mark.parametrize(
    "said", [f"{THOUGHT}done", f'{THOUGHT}<tool_call>{{"name": "look", "arguments": {{}}}}</tool_call>']
)
def test_log_probabilities_of_delimiters_are_streamed(server, says, said):
    """Delimiters add no text to the stream."""
    says(said)
    body = {"tools": TOOLS, "max_tokens": 60, "logprobs": True}
    whole = [one.token for one in chat(server, **body).choices[0].logprobs.content]
    choices = [event.choices[0] for event in streamed_chat(server, **body)]
    assert [one.token for choice in choices if choice.logprobs for one in choice.logprobs.content] == whole
    assert "</think>" in "".join(whole)


KINDS, LETTERS = st.sampled_from(["text", "reasoning", "call"]), st.text("ab", max_size=2)
PIECES = st.builds(Piece, KINDS, LETTERS, st.integers(0, 2))
CALLS = st.builds(call_piece, st.integers(0, 2), st.just("look"), LETTERS)


@given(st.lists(PIECES | CALLS))
def test_merged_joins_pieces_by_kind_and_call(pieces):
    """A function name begins a new piece, even without arguments; other pieces have text."""
    begun, keyed = 0, []
    for piece in pieces:
        begun += piece.name is not None
        if piece.text or piece.name is not None:
            keyed.append(((piece.kind, piece.index, begun), piece.text))
    runs = groupby(keyed, key=lambda pair: pair[0])
    wanted = [(kind, index, "".join(text for _, text in run)) for (kind, index, _), run in runs]
    assert [(piece.kind, piece.index, piece.text) for piece in merged(pieces)] == wanted
