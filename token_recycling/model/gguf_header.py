"""The header of a GGUF file: what the file says of its model, and whether it is whole, without reading weights.

The format is that of llama.cpp (ggml-org/ggml, `docs/gguf.md`): a magic word, key-value pairs, the tensors' types and
places, the tensors. The package `gguf` makes an object of every token, which takes seconds for a vocabulary of 49,152;
here it is a tenth of one.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}


class Header:
    """What a GGUF file says of itself."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, len(MAGIC)
        self.values: dict[str, Any] = {}
        """Numbers and texts by key; arrays are left out."""
        self.kinds: set[int] = set()
        """The types of its tensors, as ggml numbers them."""
        self.elements = 0
        """Of all tensors together."""
        _, tensors, pairs = self._numbers("IQQ")
        for _ in range(pairs):
            key = self._text()
            value = self._value(self._number("I"))
            if value is not None:
                self.values[key] = value
        ends = [0, *(self._tensor() for _ in range(tensors))]
        alignment = self.values.get("general.alignment", _DEFAULT_ALIGNMENT)
        self.length = -(-self._at // alignment) * alignment + max(ends)
        """Bytes of the whole file, as far as its known types tell."""

    @property
    def unpacked(self) -> int:
        """Bytes of the model in float32."""
        return 4 * self.elements

    def _tensor(self) -> int:
        """Note a tensor; return where its data ends, counted from the first tensor's beginning."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self._text()
        elements = prod(self._numbers(f"{self._number('I')}Q"))
        kind, offset = self._numbers("IQ")
        self.kinds.add(kind)
        self.elements += elements
        known = kind in GGMLQuantizationType.__members__.values()
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)] if known else (1, 0)
        return int(offset + elements // block * size)

    def _value(self, kind: int) -> Any:
        """A number or a text; None for an array, which is passed over."""
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind])
        of, length = self._numbers("IQ")
        if of in _SCALARS:
            self._at += length * struct.calcsize(_SCALARS[of])
        else:
            for _ in range(length):
                self._value(of)
        return None

    def _text(self) -> str:
        return str(self._number(f"{self._number('Q')}s"), "utf-8")

    def _number(self, kind: str) -> Any:
        return self._numbers(kind)[0]

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{kinds}", self._data, self._at)
        self._at += struct.calcsize(f"<{kinds}")
        return found


def header(path: Path) -> Header:
    """Read the header of a file; raises ValueError for one that is no GGUF file, or cut off."""
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"expected a GGUF file, got {path}, which begins otherwise; give a model's .gguf file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            whole = ""
            with contextlib.suppress(struct.error, OverflowError, KeyError, UnicodeDecodeError, RecursionError):
                found = Header(data)
                if found.length <= len(data):
                    return found
                whole = f" of {found.length:,}"
            raise ValueError(
                f"expected a whole GGUF file, got {path}, which ends too early or is damaged ({len(data):,} bytes"
                f"{whole}); download it again"
            )
