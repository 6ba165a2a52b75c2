"""The code path of a streaming request stays readable: few modules, and no stack of generators."""

import inspect
import sys
import threading

from support.functions import HELD
from support.serving import serving
from support.speaking import chat_tokenizer, ending_llama

SCHEMA = {"type": "object", "properties": {"at": {"enum": ["here", "there"]}}, "required": ["at"]}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
BODY = {"messages": [{"role": "user", "content": "a"}], "tools": HELD, "response_format": FORM, "max_tokens": 60}


def test_stream_enters_few_modules_and_two_generators():
    model = ending_llama()
    entered, generators, decoding = set(), set(), threading.Event()

    def note(frame, event, argument):
        if event != "call" or "/token_recycling/" not in frame.f_code.co_filename:
            return
        module = frame.f_code.co_filename.rsplit("/token_recycling/", 1)[1]
        if module in ("serving/decoding_thread.py", "hf/call.py"):
            decoding.set()
        if module.startswith("serving/") and not decoding.is_set():
            entered.add(module)
        if module.startswith("serving/") and frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR:
            generators.add(frame.f_code.co_name)

    threading.setprofile(note)  # for threads that start from now on
    try:
        with serving(model, chat_tokenizer()) as server:
            server.engine.metrics.count_request("warm", 200, 0.0)
            entered.clear(), generators.clear(), decoding.clear()
            answer = server.post("/v1/chat/completions", {**BODY, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    generators.discard("lifespan")
    assert generators == {"events_of", "generate"}
    assert len(entered) <= 12, sorted(entered)
