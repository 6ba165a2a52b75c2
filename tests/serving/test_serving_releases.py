"""The server with every release of transformers: outputs of each route equal those of `generate`."""

import contextlib
import json
import threading
import time
from urllib.request import Request, urlopen

import pytest
from support import tiny

pytest.importorskip("fastapi")
pytestmark = pytest.mark.core

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


@contextlib.contextmanager
def served(model, tokenizer):
    """Yield a function that posts a request and returns the body of the answer."""
    from token_recycling.serving import HttpServer, create_app

    server = HttpServer(create_app(model, tokenizer, name="tiny", host="127.0.0.1", port=0))
    thread = threading.Thread(target=server.run)
    thread.start()

    def post(path, **body):
        (socket,) = server.servers[0].sockets
        address = f"http://127.0.0.1:{socket.getsockname()[1]}{path}"
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(address, json.dumps(body).encode(), headers), timeout=60) as answer:
            return answer.read().decode()

    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield post
    finally:
        server.should_exit = True
        thread.join()


def test_outputs_of_every_route_equal_generate():
    model, tokenizer = tiny.llama(vocab_size=300), tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    greedy = {"model": "tiny", "temperature": 0}

    def generated(prompt):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        said = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        return tokenizer.decode(said, skip_special_tokens=True)

    text, chat = generated("import os"), generated("user: import os\nassistant: ")
    messages = [{"role": "user", "content": "import os"}]
    with served(model, tokenizer) as post:
        answer = json.loads(post("/v1/completions", prompt="import os", max_tokens=12, **greedy))
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["speculation"]["accelerated"]
        answer = json.loads(post("/v1/chat/completions", messages=messages, max_tokens=12, **greedy))
        assert answer["choices"][0]["message"]["content"] == chat
        answer = json.loads(post("/v1/responses", input="import os", max_output_tokens=12, **greedy))
        assert answer["output"][0]["content"][0]["text"] == chat
        stream = post("/v1/completions", prompt="import os", max_tokens=12, stream=True, **greedy).split("\n\n")
        parts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in stream[:-2]]
        assert ("".join(parts), stream[-2:]) == (text, ["data: [DONE]", ""])
        steps = post("/v1/token_recycling/steps", prompt="import os", max_tokens=12, **greedy)
        assert steps.startswith("event: start\n")
        assert "\nevent: end\n" in steps
