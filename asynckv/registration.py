"""Memory that an engine registers: a checked layout, and whatever keeps the memory alive."""

from __future__ import annotations

from dataclasses import dataclass

from asynckv.arguments import shown
from asynckv.errors import LayoutError
from asynckv.geometry.layout import Layout, check_layout, valid_layout

__all__ = ["Registration", "register_memory"]


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """A layout that was checked, with its memory.

    Attributes:
        layout: What this rank holds, and where.
        owners: Objects (tensors, buffers) that must live as long as the engine does.
    """

    layout: Layout
    owners: tuple[object, ...] = ()


def register_memory(layout: Layout, owners: tuple[object, ...] = ()) -> Registration:
    """Declare explicit memory ranges.

    Args:
        layout: Addresses, groups, views and parts.
        owners: Whatever must not be freed while the engine lives.

    Raises:
        LayoutError: Naming the field, both numbers and the remedy.
    """
    checked = valid_layout(layout)
    if not isinstance(owners, tuple | list):
        raise LayoutError(f"owners is {shown(owners)}; give a tuple of whatever must not be freed")
    check_layout(checked)
    return Registration(checked, tuple(owners))
