"""Chat in the browser with an accelerated model: Gradio's ChatInterface with streaming.

    pip install gradio
    python examples/chat_interface.py [MODEL] [--port N]

A model without a chat template, such as the shipped one, continues the last message.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import gradio
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextIteratorStreamer,
)

from token_recycling import accelerate

SHIPPED = Path(__file__).parent.parent / "models" / "target"


def interface(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options) -> gradio.ChatInterface:
    """Return the chat interface of a model; `options` are passed to `generate`."""

    def answer(message: str, history: list[dict]) -> Iterator[str]:
        if tokenizer.chat_template is None:
            inputs = tokenizer(message, return_tensors="pt")
        else:
            turns = [*history, {"role": "user", "content": message}]
            inputs = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        thread = Thread(target=model.generate, kwargs={**inputs.to(model.device), **options, "streamer": streamer})
        thread.start()
        text = ""
        for piece in streamer:
            text += piece
            yield text
        thread.join()

    return gradio.ChatInterface(answer, title="Accelerated by token recycling")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(SHIPPED), help="a local folder or a hub name")
    parser.add_argument("--port", type=int, default=7860)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = accelerate(AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto"))
    interface(model, tokenizer, max_new_tokens=200).launch(server_name="127.0.0.1", server_port=arguments.port)


if __name__ == "__main__":
    main()
