"""DeepSeek-V4.1's vision tower and aligner: the pixels of one image in, the embeddings of its IMAGE tokens out.

The forward pass of one image of `grid_h x grid_w` patches (N = grid_h * grid_w, D the vision width, r the downsample
ratio):

1. `PatchEmbed` flattens each patch (channel, row, column) and projects it to D. There is no class token.
2. Each `Block` adds attention and a gated MLP to the stream, both behind an RMSNorm. Attention is bidirectional over
   the image; position enters only through a 2-D rotation of q and k: half of the rotated pairs turn with the patch
   row, half with the patch column.
3. A last RMSNorm.
4. `Aligner` joins r x r neighbouring patches (zeros beyond the right and bottom edge) and maps them to the text width.

Images are encoded one at a time, so that the result of one never depends on another. Attribute names are the
checkpoint's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finback.base.runtime import ConfigError, RequestError

# What a token of the prompt is: text, or one of the four kinds in an image's span. START, NEWLINE and END rows take
# learned vectors, IMAGE rows take the aligner's output.
TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3

_NORM_EPS = 1e-6


def _widened(x: Tensor) -> Tensor:
    """`x` in the dtype of exact side computations: float64 stays, everything narrower becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6) * weight over the last axis, in float32 (float64 for float64), result in x's dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = _widened(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _NORM_EPS)
        return (wide * _widened(self.weight)).to(x.dtype)


def rotary_2d(grid_h: int, grid_w: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every patch's rotation, each [grid_h * grid_w, head_dim // 2] float64 on the CPU.

    With inv_j = theta^(-4j / head_dim), j in [0, head_dim / 4), patch (row, col) has the angles
    [row * inv_j ..., col * inv_j ...]. Coordinates are raw patch indices: nothing is interpolated to a reference size.
    """
    steps = torch.arange(head_dim // 4, dtype=torch.float64, device="cpu")
    inv_freq = theta ** (-4.0 * steps / head_dim)
    rows = torch.arange(grid_h, dtype=torch.float64, device="cpu")[:, None] * inv_freq
    cols = torch.arange(grid_w, dtype=torch.float64, device="cpu")[:, None] * inv_freq
    angles = torch.cat([rows.repeat_interleave(grid_w, dim=0), cols.repeat(grid_h, 1)], dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Split-half rotation of x [N, H, h] by tables [N, 1, h / 2] in the tables' dtype; result in x's dtype."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class PatchEmbed(nn.Module):
    """[N, 3, p, p] -> [N, dim]: one linear map of the flattened patch."""

    def __init__(self, patch_size: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * patch_size * patch_size, dim)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches.to(self.proj.weight).flatten(1))


class Attention(nn.Module):
    """Bidirectional multi-head attention over the patches of one image, softmax(q k^T / sqrt(h)) v."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.wqkv = nn.Linear(dim, 3 * dim)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)) for t in self.wqkv(x).chunk(3, dim=-1))  # [N, H, h]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, H, N, h]
        if q.is_cpu:  # in a narrow type, torch's attention for CPUs rounds its scores and weights too
            q, k, v = _widened(q), _widened(k), _widened(v)
        out = F.scaled_dot_product_attention(q, k, v).to(x.dtype)
        return self.wo(out[0].transpose(0, 1).flatten(1))


class MLP(nn.Module):
    """w2(silu(gate) * up) with [gate, up] = w1(x); no biases."""

    def __init__(self, dim: int, inter_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, 2 * inter_dim, bias=False)
        self.w2 = nn.Linear(inter_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    """x += attn(norm1(x)); x += mlp(norm2(x))."""

    def __init__(self, dim: int, n_heads: int, inter_dim: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(dim)
        self.attn = Attention(dim, n_heads)
        self.norm2 = RMSNorm(dim)
        self.mlp = MLP(dim, inter_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """The vision tower.

    Args:
        n_layers: number of blocks.
        dim: vision width D.
        n_heads: attention heads; D / n_heads must be a multiple of 4 (two axes, pairs of channels).
        inter_dim: width of the MLP's gate and of its up part, each.
        patch_size: side p of a patch in pixels.
        rope_theta: base of the rotary frequencies.

    Raises:
        ConfigError: the heads do not divide the width as above.
    """

    def __init__(
        self, *, n_layers: int, dim: int, n_heads: int, inter_dim: int, patch_size: int, rope_theta: float
    ) -> None:
        super().__init__()
        if n_heads < 1 or dim % (4 * n_heads):
            raise ConfigError(
                f"the vision tower's width {dim} with {n_heads} heads cannot be rotated in 2-D: the width must be a "
                f"multiple of 4 x heads; check hidden_size and num_attention_heads of vision_config"
            )
        self.head_dim = dim // n_heads
        self.rope_theta = rope_theta
        self.patch_embed = PatchEmbed(patch_size, dim)
        self.blocks = nn.ModuleList(Block(dim, n_heads, inter_dim) for _ in range(n_layers))
        self.norm = RMSNorm(dim)

    def forward(self, patches: Tensor, grid_h: int, grid_w: int) -> Tensor:
        """Encode one image.

        Args:
            patches: [grid_h * grid_w, 3, p, p], normalised pixels in reading order, any floating dtype and device.
            grid_h: rows of patches.
            grid_w: patches per row.

        Returns:
            [grid_h * grid_w, D] in the weights' dtype.

        Raises:
            RequestError: the number of patches is not grid_h * grid_w.
        """
        if patches.shape[0] != grid_h * grid_w:
            raise RequestError(
                f"{patches.shape[0]} patches were given for a grid of {grid_h} x {grid_w} = {grid_h * grid_w}; "
                f"pass the rows and columns of patches of this one image"
            )
        x = self.patch_embed(patches)
        table_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = (
            table.to(device=x.device, dtype=table_dtype)[:, None]
            for table in rotary_2d(grid_h, grid_w, self.head_dim, self.rope_theta)
        )  # [N, 1, h / 2]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)


class Aligner(nn.Module):
    """Joins r x r patches and maps them to the text model's width: w2(gelu(w1(joined))), exact (erf) GELU.

    Args:
        vision_dim: width D of the vision tower.
        dim: width of the text model.
        downsample_ratio: r.
    """

    def __init__(self, *, vision_dim: int, dim: int, downsample_ratio: int) -> None:
        super().__init__()
        self.ratio = downsample_ratio
        self.w1 = nn.Linear(vision_dim * downsample_ratio**2, dim)
        self.w2 = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid_h: int, grid_w: int) -> Tensor:
        """x [grid_h * grid_w, D] of one image -> [ceil(grid_h / r) * ceil(grid_w / r), dim], in reading order.

        A joined row holds its features channel first: (channel, row in the square, column in the square). Squares that
        stick out at the right or the bottom are filled with zeros.
        """
        r = self.ratio
        x = x.unflatten(0, (grid_h, grid_w))
        x = F.pad(x, (0, 0, 0, -grid_w % r, 0, -grid_h % r))
        x = x.unflatten(1, (-1, r)).unflatten(0, (-1, r))  # [h / r, r, w / r, r, D]
        x = x.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)  # [h / r * w / r, D * r * r]
        return self.w2(F.gelu(self.w1(x)))
