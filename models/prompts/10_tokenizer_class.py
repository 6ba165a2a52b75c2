import collections
import json
import os
import re
from typing import Optional


class WordTokenizer:
    """
    Splits text into words and punctuation and maps them to ids.

    Args:
        vocab (`dict[str, int]`):
            The id of every token.
        unk_token (`str`, *optional*, defaults to `"<unk>"`):
            The token that stands for words outside the vocabulary.
        pad_token (`str`, *optional*, defaults to `"<pad>"`):
            The token used for padding.
    """

    pattern = re.compile(r"\w+|[^\w\s]")

    def __init__(self, vocab, unk_token="<unk>", pad_token="<pad>"):
        self.vocab = vocab
        self.ids_to_tokens = {index: token for token, index in vocab.items()}
        self.unk_token = unk_token
        self.pad_token = pad_token

    @property
    def vocab_size(self):
        return len(self.vocab)

    def tokenize(self, text: str) -> list[str]:
        return self.pattern.findall(text)

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        unk_id = self.vocab[self.unk_token]
        return [self.vocab.get(token, unk_id) for token in tokens]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: