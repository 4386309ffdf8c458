"""`nn.MultiheadAttention` with packed projections."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.storage.packed_modules import PackedLayer, PackedLinear, packed

PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def is_attention(layer: nn.Module) -> bool:
    """Return whether a layer is torch's MultiheadAttention, packed or not, and no subclass of a user."""
    return type(layer) in (nn.MultiheadAttention, PackedAttention)


class PackedAttention(nn.MultiheadAttention):
    """MultiheadAttention whose projections are packed linear layers.

    Self-attention runs on the sparse kernels. Other calls run torch's forward on the dense weights: attention between
    different tensors, inputs without a batch, `add_bias_kv` and `add_zero_attn`.
    """

    in_proj: PackedLinear

    @classmethod
    def from_torch(cls, attention: nn.MultiheadAttention) -> PackedAttention:
        """Let an attention of torch take packed projections; it stays the same object."""
        mine = cast(PackedAttention, attention)
        if type(attention) is nn.MultiheadAttention:
            mine.__class__ = cls
            mine.joint = mine._qkv_same_embed_dim
            mine._qkv_same_embed_dim = False  # torch's fused kernels, which read dense weights, are not used then
        return mine

    def pack(self, leaf: str, mask: Tensor, final: int | None, memory: Tensor | None) -> PackedLayer:
        """Replace one of the weights of the input projection by a packed linear layer."""
        weight = cast(nn.Parameter, self._parameters[leaf])
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = weight
        new = packed(layer, mask, final, memory)
        assert new is not None
        new.weight_suffix = "_weight"
        del self._parameters[leaf]
        self.add_module(leaf.removesuffix("_weight"), new.train(self.training))
        return new

    def __getattr__(self, name: str) -> Any:
        """The dense weights of packed projections, for torch's forward."""
        modules = vars(self).get("_modules", {})
        if name in PROJECTIONS and name.removesuffix("_weight") in modules:
            return modules[name.removesuffix("_weight")].dense_weight()
        if name in PROJECTIONS[1:] and vars(self).get("joint"):
            return self.in_proj_weight.chunk(3)[PROJECTIONS.index(name) - 1]
        return super().__getattr__(name)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        unusual = self.bias_k is not None or self.bias_v is not None or self.add_zero_attn or query.dim() != 3
        if unusual or not (query is key is value) or not self.joint:
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "is_causal": is_causal}
            weights = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
            return super().forward(query, key, value, **masks, **weights)  # type: ignore[arg-type]
        x = query if self.batch_first else query.transpose(0, 1)
        mask = self._mask(attn_mask, key_padding_mask, x)
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        q, k, v = self._heads(x)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5)
            attention = F.softmax(scores if mask is None else scores + mask, -1)
            attention = F.dropout(attention, dropout) if dropout else attention
            mixed, weights_out = attention @ v, attention.mean(1) if average_attn_weights else attention
        else:
            causal = is_causal and key_padding_mask is None
            mixed = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout, causal)
            weights_out = None
        out = self.out_proj.forward(mixed.transpose(1, 2).flatten(2))  # torch does not call its hooks either
        return out if self.batch_first else out.transpose(0, 1), weights_out

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each of the shape (batch, heads, tokens, channels of a head)."""
        if "in_proj" in self._modules:
            projected = cast(Tensor, self.in_proj.forward(x))
            projected = projected if self.in_proj_bias is None else projected + self.in_proj_bias
        else:
            projected = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        return projected.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, x: Tensor) -> Tensor | None:
        """The sum of both masks as floating-point numbers, of a shape that broadcasts to the scores."""
        mask = None
        for given, shape in (
            (attn_mask, (-1, self.num_heads) if attn_mask is not None and attn_mask.dim() == 3 else ()),
            (key_padding_mask, (-1, 1, 1)),
        ):
            if given is None:
                continue
            if given.dtype == torch.bool:
                given = torch.zeros_like(given, dtype=x.dtype).masked_fill_(given, -torch.inf)
            if shape:
                given = given.view(*shape, *given.shape[1:])
            mask = given if mask is None else mask + given
        return mask
