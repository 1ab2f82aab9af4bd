"""Whether the KV of one pool makes sense in another. Pure; knows no bytes and no blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from common.errors import LayoutMismatchError
from common.messages import KVLayout

_MEANING = ("version", "model", "kind", "dtype", "num_layers", "head_dim")
"""Fields without which the same bytes mean something else."""


def check_compatible(source: KVLayout, target: KVLayout) -> None:
    """The plan can move KV from ``source`` to ``target``: same meaning, and some heads in common.

    Block sizes and head ranges may differ. Raises LayoutMismatchError with both values of each field
    that stands in the way.
    """
    differing = [name for name in _MEANING if getattr(source, name) != getattr(target, name)]
    if total_heads(source) != total_heads(target):
        differing.append("total_kv_heads")
    if not differing and not common_heads(source, target):
        differing += ["head_start", "num_kv_heads"]
    _refuse(source, target, differing)


def check_equal(source: KVLayout, target: KVLayout) -> None:
    """Blocks can be moved whole, as they lie. Raises LayoutMismatchError like `check_compatible`."""
    names = [field.name for field in fields(KVLayout)]
    _refuse(source, target, [name for name in names if getattr(source, name) != getattr(target, name)])


def total_heads(layout: KVLayout) -> int:
    """KV heads of the whole model, over all ranks."""
    return layout.total_kv_heads or layout.num_kv_heads * layout.tp_size


def common_heads(source: KVLayout, target: KVLayout) -> range:
    """The KV heads (numbered over the whole model) that both ranks hold."""
    start = max(source.head_start, target.head_start)
    stop = min(source.head_start + source.num_kv_heads, target.head_start + target.num_kv_heads)
    return range(start, max(start, stop))


def _refuse(source: KVLayout, target: KVLayout, names: Iterable[str]) -> None:
    differences = [f"{name} is {getattr(source, name)!r} and {getattr(target, name)!r}" for name in names]
    if differences:
        raise LayoutMismatchError(f"KV layouts of sender and receiver differ: {'; '.join(differences)}")
