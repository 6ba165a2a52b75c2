"""What every request must be answered: the text of transformers' own `generate`, of the same model."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from token_recycling.model.loading import load

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Wish:
    """What is asked for."""

    prompt: str
    tokens: int
    seed: int | None = None
    """Drawn with that seed; None: greedy."""
    stop: str | None = None
    chat: bool = False
    before: tuple[tuple[str, str], ...] = ()
    """Of a chat, the role and the text of every message before the prompt."""


class Plain:
    """Texts by plain decoding, each once."""

    def __init__(self, model: str, prompts: Path) -> None:
        """`prompts`: a folder of files whose beginnings are the prompts."""
        self._loaded = load(model)
        self._texts: dict[Wish, str] = {}
        self._lock = threading.Lock()
        lines = [line for file in sorted(prompts.iterdir()) for line in file.read_text(encoding="utf-8").splitlines()]
        self.prompts = [line for line in lines if 20 < len(line) < 100][:400]

    def ids(self, prompt: str) -> list[int]:
        """A prompt's tokens."""
        return self._loaded.tokenizer(prompt)["input_ids"]

    def text(self, wish: Wish) -> str:
        """What must come back."""
        with self._lock:
            if wish not in self._texts:
                self._texts[wish] = self._generated(wish)
            return self._texts[wish]

    def margin(self, wish: Wish, text: str) -> float | None:
        """How far apart the two best logits are where `text` leaves the greedy text; None if it is drawn, or goes on
        where that ends.
        """
        if wish.seed is not None:
            return None
        tokenizer, ids = self._loaded.tokenizer, self._inputs(wish)
        how = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
        made = self._loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=wish.tokens, **how)
        tokens = made.sequences[0, ids.shape[1] :]
        for place, logits in enumerate(made.logits):
            if not text.startswith(tokenizer.decode(tokens[: place + 1], skip_special_tokens=True)):
                best, next_best = logits[0].topk(2).values.tolist()
                return best - next_best
        return None

    def _inputs(self, wish: Wish) -> torch.Tensor:
        before = "".join(f"{role}: {text}\n" for role, text in wish.before)
        prompt = f"{before}user: {wish.prompt}\nassistant: " if wish.chat else wish.prompt
        return self._loaded.tokenizer(prompt, return_tensors="pt", add_special_tokens=not wish.chat)["input_ids"]

    def _generated(self, wish: Wish) -> str:
        tokenizer, model = self._loaded.tokenizer, self._loaded.model
        ids, how = self._inputs(wish), {"do_sample": False}
        if wish.seed is not None:
            torch.manual_seed(wish.seed)
            how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=wish.tokens, pad_token_id=0, **how
        )
        text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        return text if wish.stop is None else text.partition(wish.stop)[0]
