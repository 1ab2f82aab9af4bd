"""Quantised weights: small codes, of which neighbouring inputs share a scale. Knows no kernels.

A weight is scale * (code - 128) with 8 bits, scale * code + minimum with 4; `GROUP` inputs of an output share both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

GROUP = 32


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """``codes``: uint8 [out, groups * GROUP], zeros of the weight behind its last input. ``scales``, and with 4
    ``bits`` ``minima``: float16 [out, groups].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    inputs: int
    bits: int

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantisedWeight:
        """The same with other outputs: ``change`` picks or reorders rows."""
        minima = None if self.minima is None else change(self.minima)
        return QuantisedWeight(change(self.codes), change(self.scales), minima, self.inputs, self.bits)

    def expanded(self) -> torch.Tensor:
        """The weight that it stands for, float32 [out, in]."""
        codes = self.codes.unflatten(-1, (-1, GROUP)).float()
        if self.minima is None:
            wide = (codes - 128) * self.scales.float()[..., None]
        else:
            wide = codes * self.scales.float()[..., None] + self.minima.float()[..., None]
        return wide.flatten(1)[:, : self.inputs]


def rounded(weight: torch.Tensor, bits: int) -> QuantisedWeight:
    """``weight`` [out, in] in 8 or 4 bits: within half a scale, which is a 127th of the largest of its group, or a 15th
    of the distance from its least to its largest.
    """
    inputs = weight.shape[1]
    grouped = pad(weight.float(), (0, -inputs % GROUP)).unflatten(-1, (-1, GROUP))
    if bits == 8:
        scales, minima, offset, highest = (grouped.abs().amax(-1) / 127).half(), None, 128, 255
    else:
        minima = grouped.amin(-1).half()
        scales, offset, highest = ((grouped.amax(-1) - minima.float()) / 15).half(), 0, 15
        grouped = grouped - minima.float()[..., None]
    steps = scales.float()[..., None]
    codes = (torch.where(steps > 0, grouped / steps, 0.0).round() + offset).clamp(0, highest)
    return QuantisedWeight(codes.to(torch.uint8).flatten(1), scales, minima, inputs, bits)


def stacked(weights: Sequence[torch.Tensor | QuantisedWeight]) -> torch.Tensor | QuantisedWeight:
    """Weights of the same inputs as one; quantised where all of them are, and alike."""
    first = weights[0]
    if len(weights) == 1:
        return first
    quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if isinstance(first, QuantisedWeight) and [each.bits for each in quantised] == [first.bits] * len(weights):
        return QuantisedWeight(
            torch.cat([each.codes for each in quantised]),
            torch.cat([each.scales for each in quantised]),
            None if first.minima is None else torch.cat([each.minima for each in quantised if each.minima is not None]),
            first.inputs,
            first.bits,
        )
    return torch.cat([each.expanded() if isinstance(each, QuantisedWeight) else each for each in weights])
