"""Whether the KV of one pool makes sense in another, and which heads each rank holds. Pure.

Block sizes, tensor parallel sizes and number formats may differ; what the numbers mean may not.
"""

from __future__ import annotations

from common.errors import LayoutMismatchError
from common.handoff import KVLayout

KINDS = ("gqa", "mla")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")

_MEANING = ("version", "model", "kind", "num_layers", "head_dim")
"""Fields without which the same numbers mean something else."""


def check_compatible(source: KVLayout, target: KVLayout) -> None:
    """KV can be moved from ``source``'s group of ranks to ``target``.

    Raises LayoutMismatchError with both values of each field that stands in the way.
    """
    differing = [name for name in _MEANING if getattr(source, name) != getattr(target, name)]
    if total_heads(source) != total_heads(target):
        differing.append("total_kv_heads")
    if differing:
        differences = [f"{name} is {getattr(source, name)!r} and {getattr(target, name)!r}" for name in differing]
        raise LayoutMismatchError(f"KV layouts of sender and receiver differ: {'; '.join(differences)}")
    check_sound(source)
    check_sound(target)


def check_sound(layout: KVLayout) -> None:
    """Raises LayoutMismatchError when ``layout`` is none that a rank can have, with the rule it breaks."""
    if layout.kind not in KINDS or layout.dtype not in DTYPES:
        raise LayoutMismatchError(
            f"KV is of kind {' or '.join(KINDS)} and dtype {', '.join(DTYPES)}; "
            f"this layout is {layout.kind!r}, {layout.dtype!r}"
        )
    sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.tp_size)
    if min(sizes) < 1 or not 0 <= layout.tp_rank < layout.tp_size:
        raise LayoutMismatchError(f"all sizes of a KV layout are 1 or more and tp_rank is below tp_size, got {layout}")
    heads = rank_heads(total_heads(layout), layout.tp_size, layout.tp_rank)
    held = range(layout.head_start, layout.head_start + layout.num_kv_heads)
    if heads != held:
        raise LayoutMismatchError(
            f"rank {layout.tp_rank} of {layout.tp_size} holds KV heads {_span(heads)} of {total_heads(layout)}, "
            f"this layout says {_span(held)}"
        )


def total_heads(layout: KVLayout) -> int:
    """KV heads of the whole model, over all ranks."""
    return layout.total_kv_heads or layout.num_kv_heads * layout.tp_size


def rank_heads(total: int, tp_size: int, rank: int) -> range:
    """The KV heads of one rank: an equal share, or one head that ``tp_size / total`` ranks in a row hold.

    Raises LayoutMismatchError when the heads cannot be dealt out so.
    """
    if total % tp_size and tp_size % total:
        raise LayoutMismatchError(f"{total} KV heads cannot be dealt to {tp_size} ranks: neither divides the other")
    if total >= tp_size:
        share = total // tp_size
        return range(rank * share, (rank + 1) * share)
    head = rank // (tp_size // total)
    return range(head, head + 1)


def _span(heads: range) -> str:
    return f"{heads.start} to {heads.stop - 1}"
