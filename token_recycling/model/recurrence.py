"""Tree verification in recurrent layers: every node is read from the state after its parent.

A recurrent layer (linear attention, a state space model, a short convolution) reads in order and overwrites its state,
so it can neither skip a sibling nor return to the state before a rejected token. Here it reads the nodes of a draft one
by one (`Mixer`), each from a copy of its parent's state (`NodeStates`); the state after the last accepted node becomes
the sequence's. All other layers read all nodes in one pass, and so do the linear layers at both ends of a recurrent
layer, which hold its weights. `RecurrentStates` are those of one cache.

Cost: a small step for every node and layer, and one copy of the state per node, kept until the next step. Prompts are
read by the model's own code.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .compat import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    OwnLayer,
)
from .tree_layer import TreeLayer

_MASKS = ("attention_mask", "conv_mask")
"""Arguments that mark padding for such a layer; drafts have none."""
_OF_STATES = frozenset({"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"})
"""Cache methods that a layer with a recurrent state calls."""

Parents = Sequence[Sequence[int]]
"""The parent of each node of every sequence, -1 for the root."""


class CurrentNode:
    """The node that is being read, if any, and the parents of all nodes; shared by all states of a cache."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.parents: list[list[int]] = []
        """By node, its parent in each sequence; -1 for the root."""


class NodeStates(dict[int, Any]):
    """States by number, as a cache layer stores them after its first pass. While a node is read, they are that node's
    own, each copied from its parent's on first access.
    """

    def __init__(self, states: dict[int, Any], current: CurrentNode) -> None:
        super().__init__(states)
        self.current = current
        self._nodes: list[dict[int, torch.Tensor]] = []

    def __reduce__(self) -> Any:
        """Pickle and copy without the states of nodes."""
        return NodeStates, (dict(self), self.current)

    def begin(self) -> None:
        """Discard the nodes of an earlier draft."""
        self._nodes = [{} for _ in self.current.parents]

    def keep(self, nodes: Sequence[int | None]) -> None:
        """Make the state after the node `nodes[row]`, the last accepted one, that of the sequence; None keeps the old
        state.
        """
        before, self._nodes = self._nodes, []
        for number in sorted({number for states in before for number in states}):
            if len(nodes) == 1 and nodes[0] is not None:
                self[number] = before[nodes[0]][number]
                continue
            for row, node in enumerate(nodes):
                if node is not None:
                    self[number][row] = before[node][number][row]

    def __getitem__(self, number: int) -> Any:
        node = self.current.number
        if node is None:
            return super().__getitem__(number)
        states = self._nodes[node]
        if number not in states:
            before, parents = super().__getitem__(number), self.current.parents[node]
            states[number] = _copied_rows([before if parent < 0 else self._nodes[parent][number] for parent in parents])
        return states[number]

    def __setitem__(self, number: int, state: Any) -> None:
        node = self.current.number
        if node is None:
            super().__setitem__(number, state)
        else:
            self._nodes[node][number] = state


def _copied_rows(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one state for all sequences: row i of `states[i]`."""
    if all(state is states[0] for state in states):
        return states[0].clone()
    return torch.stack([state[row] for row, state in enumerate(states)])


class Mixer:
    """A layer of a model that keeps a state and reads the nodes of a tree one by one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.linear = [part for part in module.children() if type(part) is torch.nn.Linear]
        """Its linear layers, which process rows independently."""
        self.last: torch.nn.Linear | None = None
        """The linear layer whose output is the layer's, once this is known."""

    def hooks(self, current: CurrentNode, thread: int) -> Iterator[RemovableHandle]:
        """Register the hooks that make the layer read node by node in one thread."""
        walk = _Walk(self, current, thread)
        yield self.module.register_forward_pre_hook(walk.before, with_kwargs=True)
        yield self.module.register_forward_hook(walk.after)
        for part in self.linear:
            yield part.register_forward_pre_hook(walk.before_linear)
            yield part.register_forward_hook(walk.after_linear)


class _Walk:
    """One pass of a mixer over the nodes of a tree."""

    def __init__(self, mixer: Mixer, current: CurrentNode, thread: int) -> None:
        self._mixer, self._current, self._thread = mixer, current, thread
        self._last = mixer.last
        """Its value at the start: another thread may set it during this pass."""
        self._on = False
        self._nodes: torch.Tensor
        """(batch, n, hidden): the layer's input; (batch, 1, hidden) of the node that is being read."""
        self._node: torch.Tensor
        self._read: dict[torch.nn.Module, torch.Tensor] = {}
        """Outputs for all nodes of the linear layers at the beginning."""
        self._open: list[torch.Tensor] = []
        """Inputs, by node, that the linear layer at the end has not read yet."""
        self._candidates: list[tuple[torch.nn.Linear, torch.Tensor]] = []
        """Outputs of the other linear layers, until the one at the end is known."""

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Start a call of the layer for all nodes: let it read the first one."""
        # A hook that is removed while another thread's pass is about to call it gets no keyword arguments.
        if kwargs is None or threading.get_ident() != self._thread:
            return None
        kwargs = {name: None if name in _MASKS else value for name, value in kwargs.items()}
        self._nodes = args[0] if args else kwargs.pop("hidden_states")
        self._others, self._on = (args[1:], kwargs), True
        return self._move_to(0)

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Finish the call: after the first node, read the others."""
        if threading.get_ident() != self._thread:
            return None
        by_node = [_parts(output)]
        for node in range(1, self._nodes.shape[1]):
            inputs, named = self._move_to(node)
            by_node.append(_parts(module.forward(*inputs, **named)))
        self._on, self._current.number = False, None
        if self._last is None:
            self._mixer.last = next((part for part, result in self._candidates if result is by_node[0][0]), None)
        outputs = [None if parts[0] is None else torch.cat(parts, dim=1) for parts in zip(*by_node, strict=True)]
        if self._open and self._last is not None:
            outputs[0] = self._last(torch.cat(self._open, dim=1))
        return outputs[0] if isinstance(output, torch.Tensor) else tuple(outputs)

    def before_linear(self, part: torch.nn.Linear, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        """Let a linear layer at the beginning read all nodes with the first. The layer whose output is the result waits
        until it can read them all.
        """
        if threading.get_ident() != self._thread or not self._on:
            return None
        (states,) = args
        if states is self._node:
            return (self._nodes if part not in self._read else states[:, :0],)
        if part is self._last:
            self._open.append(states)
            return (states[:, :0],)
        return None

    def after_linear(self, part: torch.nn.Linear, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
        if threading.get_ident() != self._thread or not self._on:
            return None
        node = self._current.number
        assert node is not None
        if args[0] is self._nodes:
            self._read[part] = output
            return output[:, :1]
        if not args[0].shape[1]:  # see `before_linear`
            read = self._read.get(part)
            return output.new_zeros(len(output), 1, output.shape[2]) if read is None else read[:, node : node + 1]
        if self._last is None and node == 0:
            self._candidates.append((part, output))
        return None

    def _move_to(self, node: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move to a node; return the layer's arguments for it."""
        self._current.number, self._node = node, self._nodes[:, node : node + 1]
        args, kwargs = self._others
        named = {name: self._of_node(value, node) for name, value in kwargs.items()}
        return (self._node, *[self._of_node(value, node) for value in args]), named

    def _of_node(self, value: Any, node: int) -> Any:
        by_node = isinstance(value, torch.Tensor) and value.shape[:2] == self._nodes.shape[:2]
        return value[:, node : node + 1] if by_node else value


def _parts(output: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the outputs of a layer as a tuple: (batch, n, ...) each, or None."""
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def keeps_state(part: torch.nn.Module) -> bool:
    """Return whether a part of a model keeps a recurrent state in the cache."""
    return _calls_for_states(getattr(type(part), "forward", None))


@functools.cache
def _calls_for_states(forward: Callable[..., Any] | None) -> bool:
    if forward is None:  # a module compiled ahead of time
        return False
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and not _OF_STATES.isdisjoint(code.co_names)


def bytes_of_states(layers: Iterable[LinearAttentionCacheLayerMixin]) -> int:
    """Return the bytes of the recurrent states in some layers of a cache."""
    by_layer = [states for layer in layers for states in (layer.conv_states, layer.recurrent_states)]
    return sum(state.nbytes for states in by_layer for state in states.values() if state is not None)


def take_states(layer: Any, states: Any) -> None:
    """Set the states of a layer to those of `states`, a layer with the same number of states."""
    for name in vars(LinearAttentionLayer(states.number_of_states)):
        setattr(layer, name, getattr(states, name))


def copied_states(layer: Any, row: int) -> LinearAttentionLayer:
    """Return a layer with copies of the states of one sequence."""
    copy = LinearAttentionLayer(layer.number_of_states)
    take_states(copy, layer)
    for name in ("conv_states", "recurrent_states"):
        states = dict(getattr(layer, name))
        for number, state in states.items():
            states[number] = None if state is None else state[row : row + 1].clone()
        setattr(copy, name, states)
    for name, value in vars(copy).items():
        if type(value) is dict:
            setattr(copy, name, dict(value))
    return copy


class RecurrentTreeLayer(TreeLayer, LinearAttentionLayer):
    """A layer with attention and a recurrent state."""

    def __init__(self, window: int, states: LinearAttentionLayer) -> None:
        """`states`: the layer that held the states before."""
        TreeLayer.__init__(self, window)
        take_states(self, states)

    def lazy_initialization(self, *keys: torch.Tensor, **states: Any) -> None:
        """Initialize keys and values, or a state."""
        if keys:
            TreeLayer.lazy_initialization(self, *keys)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def _plain_layer(self) -> DynamicLayer:
        number: dict[str, Any] = {"number_of_states": self.number_of_states}
        if self.window:
            plain = LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=self.window, **number)
        else:
            plain = LinearAttentionAndFullAttentionLayer(**number)
        take_states(plain, self)
        return plain

    def reset(self) -> None:
        TreeLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        TreeLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)


class TokenCount(OwnLayer):
    """Counts tokens for a model whose layers all keep states and have no slots."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Do nothing."""

    def update(self, *states: Any, **others: Any) -> Any:
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = 0


class RecurrentStates:
    """The recurrent states of a cache: those of its sequences, and during a pass over trees those after every node."""

    def __init__(self, cache: Cache) -> None:
        """Take over the layers of a cache that keep states, and add a count of tokens for a model that has nothing
        else. The cache still works wherever it did before.
        """
        for index, layer in enumerate(cache.layers):
            both = isinstance(layer, LinearAttentionLayer) and isinstance(layer, DynamicLayer)
            if both and not isinstance(layer, TreeLayer):
                cache.layers[index] = own = RecurrentTreeLayer(layer.sliding_window if layer.is_sliding else 0, layer)
                own.take_over(layer)
        self.layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        earlier = [layer.conv_states for layer in self.layers if isinstance(layer.conv_states, NodeStates)]
        self._current = earlier[0].current if earlier else CurrentNode()
        for layer in self.layers:
            layer.conv_states = self._taken_over(layer.conv_states)
            layer.recurrent_states = self._taken_over(layer.recurrent_states)
        counters = [layer for layer in cache.layers if isinstance(layer, TokenCount)]
        self.counter = counters[0] if counters else TokenCount()
        """Counts tokens if no layer has slots to count."""
        if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
            cache.layers.append(self.counter)

    def _taken_over(self, states: dict[int, Any]) -> NodeStates:
        if isinstance(states, NodeStates):
            return states
        # A model writes states in place, which fails for inference tensors once their inference mode has ended.
        for number, state in states.items():
            states[number] = state.clone() if state is not None and state.is_inference() else state
        return NodeStates(states, self._current)

    @property
    def _by_layer(self) -> list[NodeStates]:
        """The states of each layer, by number."""
        return [states for layer in self.layers for states in (layer.conv_states, layer.recurrent_states)]

    @property
    def nbytes(self) -> int:
        """Bytes of the states of all sequences."""
        return bytes_of_states(self.layers)

    @contextmanager
    def node_by_node(self, mixers: Sequence[Mixer], parents: Parents) -> Iterator[None]:
        """Within the block, a pass of this thread over trees stores the states after every node next to those of the
        sequences, which stay unchanged; `keep` then selects one.
        """
        self._current.parents = [list(nodes) for nodes in zip(*parents, strict=True)]
        for states in self._by_layer:
            states.begin()
        thread = threading.get_ident()
        hooks = [hook for mixer in mixers for hook in mixer.hooks(self._current, thread)]
        try:
            yield
        finally:
            self._current.number = None
            for hook in hooks:
                hook.remove()

    def keep(self, nodes: Sequence[int | None]) -> None:
        """After a pass within `node_by_node`, make the state after `nodes[row]` that of the sequence; None keeps the
        old state.
        """
        for states in self._by_layer:
            states.keep(nodes)

    def joined(self, other: RecurrentStates) -> list[tuple[NodeStates, dict[int, Any]]]:
        """Return the states of every layer, and those that it has after another cache's sequences are appended."""
        return [
            (own, {number: torch.cat([own[number], state]) for number, state in joining.items() if state is not None})
            for own, joining in zip(self._by_layer, other._by_layer, strict=True)
        ]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the states of these sequences, in this order."""
        for states in self._by_layer:
            for number, state in states.items():
                if state is not None:
                    states[number] = state[list(rows)]

    def copies(self, row: int) -> list[LinearAttentionLayer]:
        """Return layers with copies of the states of one sequence."""
        return [copied_states(layer, row) for layer in self.layers]

    def take(self, layers: Sequence[LinearAttentionLayer]) -> None:
        """Copy the states of these layers, which hold one sequence."""
        for layer, states in zip(self.layers, layers, strict=True):
            take_states(layer, copied_states(states, 0))
            layer.conv_states = self._taken_over(layer.conv_states)
            layer.recurrent_states = self._taken_over(layer.recurrent_states)

    def release(self, cache: Cache) -> None:
        """Remove the token count, and store the states in plain dictionaries, before a cache returns to its owner."""
        if cache.layers[-1] is self.counter:
            cache.layers.pop()
        for layer in self.layers:
            layer.conv_states, layer.recurrent_states = dict(layer.conv_states), dict(layer.recurrent_states)
