from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Item:
    """One kind of item in the store."""

    name: str
    price: float
    quantity: int = 0
    tags: list[str] = field(default_factory=list)

    def total(self) -> float:
        """Return the value of all pieces of this item."""
        return self.price * self.quantity


@dataclass
class Inventory:
    """All items of a store, by name."""

    items: dict[str, Item] = field(default_factory=dict)

    def add(self, item: Item) -> None:
        """Add an item, or raise its quantity if it is there already."""
        if item.name in self.items:
            self.items[item.name].quantity += item.quantity
        else:
            self.items[item.name] = item

    def remove(self, name: str, quantity: int = 1) -> None:
        """Take pieces of an item out of the store.

        Raises KeyError if there is no such item and ValueError if there
        are not enough pieces of it.
        """