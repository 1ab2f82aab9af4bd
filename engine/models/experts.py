"""A mixture of experts in one process: each token goes through the few MLPs that a router chooses for it.

Legend: N rows, X experts, K experts of a row, G groups of experts, E hidden size, I inner size of an expert.
"""

from __future__ import annotations

import torch

from engine.families import ExpertNames
from engine.kernels import Kernels
from engine.layers import GatedMLP
from engine.model_config import Experts, ModelArchitecture
from engine.weights import ModelWeights


class SparseMLP:
    """The experts of one layer. A row's result is summed in the order of its experts' numbers, whatever its
    neighbours: it depends on that row alone.
    """

    def __init__(
        self,
        weights: ModelWeights,
        layer: str,
        architecture: ModelArchitecture,
        experts: Experts,
        names: ExpertNames,
        kernels: Kernels,
    ) -> None:
        prefix, hidden, inner = f"{layer}.{names.prefix}", architecture.hidden_size, experts.inner_size
        self._router = Router(weights, f"{prefix}.gate", hidden, experts, kernels)
        self._product = kernels.product
        self._gated, self._activation = kernels.gated, architecture.activation
        self._gate_up, self._down = [], []
        for number in range(experts.count):
            gate, up = (
                weights.take(f"{prefix}.experts.{number}.{part}.weight", inner, hidden)
                for part in (names.gate, names.up)
            )
            down = weights.take(f"{prefix}.experts.{number}.{names.down}.weight", hidden, inner)
            self._gate_up.append(kernels.pack(torch.cat([gate, up])))
            self._down.append(kernels.pack(down))
        self._shared: GatedMLP | None = None
        if experts.shared_size:
            shared = tuple(f"{prefix}.shared_experts.{part}" for part in (names.gate, names.up, names.down))
            self._shared = GatedMLP(
                weights, shared[:2], shared[2], architecture, kernels, inner_size=experts.shared_size
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, E] → [N, E]."""
        weights, chosen = self._router(x)
        top_k = chosen.shape[1]
        out = torch.zeros_like(x)
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self._down)).tolist()
        rows, shares = order // top_k, weights.to(x.dtype).flatten()[order, None]
        first = 0
        for expert, count in enumerate(counts):
            if count:
                some = rows[first : first + count]
                both = self._product(x.index_select(0, some), self._gate_up[expert], None)
                result = self._product(self._gated(both, self._activation), self._down[expert], None)
                out.index_add_(0, some, result * shares[first : first + count])
                first += count
        return out if self._shared is None else out + self._shared(x)


class Router:
    """Which experts a row goes to, and with which weights. In float32, whatever the model's dtype."""

    def __init__(self, weights: ModelWeights, name: str, hidden: int, experts: Experts, kernels: Kernels) -> None:
        self._weight = kernels.pack_exactly(weights.take(f"{name}.weight", experts.count, hidden, dtype=torch.float32))
        self._experts = experts
        self._product = kernels.product
        self._bias: torch.Tensor | None = None
        if experts.corrected:
            self._bias = weights.take(f"{name}.e_score_correction_bias", experts.count, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, numbers) [N, K] of each row's experts."""
        experts = self._experts
        logits = self._product(x.float(), self._weight, None)
        scores = logits.softmax(-1) if experts.scoring == "softmax" else 1 / (torch.exp(-logits) + 1)
        choice = scores if self._bias is None else scores + self._bias
        if experts.groups > 1:
            choice = self._within_groups(choice)
        chosen = torch.topk(choice, experts.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if experts.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        return weights * experts.scale, chosen

    def _within_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """``choice`` [N, X], -inf outside each row's best groups. A group counts as much as its best expert, with
        corrected scores as its best two together (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
        """
        grouped = choice.unflatten(-1, (self._experts.groups, -1))
        if self._bias is None:
            group_scores = grouped.amax(-1)
        else:
            group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        best = torch.topk(group_scores, self._experts.top_groups, dim=-1).indices
        hidden = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(hidden[..., None], float("-inf")).flatten(1)
