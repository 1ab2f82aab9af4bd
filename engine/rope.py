"""Rotary position embedding and the ways of stretching it to longer contexts.

Knows angles, not layers. Frequencies follow transformers' formulas, in float32 like there, so that
angles at far positions agree. Legend: N tokens, H heads, D head_dim, T turned components of a head.
"""

from __future__ import annotations

import math

import torch

from engine.model_config import RopeScaling, Rotary


class RotaryTable:
    """Cosines and sines for every position a model can serve, made once.

    A row depends on its position alone: the angle is a float32 product, its cosine is taken in
    float64 and rounded, so tables on different workers agree bit for bit.
    """

    def __init__(self, rotary: Rotary, num_positions: int, device: torch.device) -> None:
        frequencies, scale = rotary_frequencies(rotary, num_positions)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        self._cos = torch.empty_like(angles)
        self._sin = torch.empty_like(angles)
        for part in range(0, num_positions, 4096):
            rows = slice(part, part + 4096)
            wide = angles[rows].double()
            self._cos[rows] = wide.cos() * scale
            self._sin[rows] = wide.sin() * scale
        self._cos = self._cos.to(device)
        self._sin = self._sin.to(device)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) [N, T/2] of ``positions`` [N], to be shared by all layers of a step."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def uses_long_factors(rotary: Rotary, num_positions: int) -> bool:
    """Whether the angles are those for contexts longer than the original one: keys do not go with those of a model
    that serves fewer positions.
    """
    return rotary.scaling.kind == "longrope" and num_positions > rotary.scaling.original_context


def rotary_frequencies(rotary: Rotary, num_positions: int) -> tuple[torch.Tensor, float]:
    """Radians per token [T/2] in float32, and the factor on cosines and sines, where positions below
    ``num_positions`` are served.
    """
    scaling, dim = rotary.scaling, rotary.dim
    plain = 1.0 / (rotary.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "factors":
        return plain / torch.tensor(scaling.factors, dtype=torch.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, scaling, rotary.theta, dim), _yarn_scale(scaling)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if uses_long_factors(rotary, num_positions) else scaling.factors
        # The factors are multiplied first, as transformers does: other bits otherwise.
        stretched = torch.tensor(factors, dtype=torch.float32) * rotary.theta ** (
            torch.arange(0, dim, 2, dtype=torch.float32) / dim
        )
        return 1.0 / stretched, scaling.attention_factor or 1.0
    return plain, 1.0


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long waves are stretched by ``factor``, short ones are kept, those between are blended."""
    waves = 2 * math.pi / plain
    blend = (scaling.original_context / waves - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    stretched = torch.where(waves > scaling.original_context / scaling.low_freq_factor, plain / scaling.factor, blended)
    return torch.where(waves < scaling.original_context / scaling.high_freq_factor, plain, stretched)


def _yarn(plain: torch.Tensor, scaling: RopeScaling, theta: float, dim: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): interpolates dimensions that turn less than ``beta_slow`` times
    within the original context, keeps those that turn more than ``beta_fast`` times, ramps between.
    """

    def dimension_turning(times: float) -> float:
        return dim * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_turning(scaling.beta_fast), dimension_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _yarn_scale(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)
