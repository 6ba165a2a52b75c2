"""A simulated card: tensors report another device, but their values are in host memory.

Within `PretendCard` a complete call runs "on a card" on any machine. As on a real card, operations across devices fail,
and values cannot be read without a copy; every copy between host and card is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from support.nested import mapped, tensors_in
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("card")
CARD = torch.device("card", 0)
aten = torch.ops.aten
# The card uses the random numbers of the host.
torch.card.get_rng_state = lambda device: torch.get_rng_state()
torch.card.set_rng_state = lambda state, device: torch.set_rng_state(state)
_READING = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.is_nonzero}


class OnCard(torch.Tensor):
    """A tensor that reports to be on the card."""

    __module__ = "torch"  # counts as torch's own tensor, not as user code
    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnCard:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=CARD
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("expected operations on the card within PretendCard")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("expected a tensor on the host, got one on the card; copy it with cpu()")


class PretendCard(TorchDispatchMode):
    """Simulate a card within a block, and count copies between card and host."""

    def __init__(self) -> None:
        super().__init__()
        self.crossed: Counter[str] = Counter()
        """Number of copies `to card` and `to host`, and of values `read` without a copy."""

    def __enter__(self) -> PretendCard:
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) is created on the host, then copied
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch._C._set_only_lift_cpu_tensors(self._lifts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, dict(kwargs or {})
        tensors = list(tensors_in((args, kwargs)))
        on_card = [one for one in tensors if isinstance(one, OnCard)]
        device, _ = kwargs.get("device"), kwargs.pop("pin_memory", None)
        to_card = bool(on_card) if device is None else torch.device(device).type == CARD.type
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        self._watch(packet, args, tensors, on_card, to_card)
        plain_args, plain = mapped(lambda one: one.held if isinstance(one, OnCard) else one, (args, kwargs))
        result = func(*plain_args, **plain)
        whole = {id(one.held): one for one in on_card}

        def wrapped(one: torch.Tensor) -> torch.Tensor:
            if not to_card:
                return one
            return whole.get(id(one)) if id(one) in whole else OnCard(one)

        return mapped(wrapped, result)

    def _watch(
        self, packet: Any, args: Any, tensors: list[torch.Tensor], on_card: list[torch.Tensor], to_card: bool
    ) -> None:
        if packet in (aten._to_copy, aten.copy_):
            source = isinstance(args[1 if packet is aten.copy_ else 0], OnCard)
            target = isinstance(args[0], OnCard) if packet is aten.copy_ else to_card
            if source != target:
                self.crossed["to card" if target else "to host"] += 1
        elif on_card and packet in _READING:
            self.crossed["read"] += 1
        elif on_card and any(one.ndim for one in tensors if not isinstance(one, OnCard)):
            raise RuntimeError(f"{packet}: expected all tensors on one device")
