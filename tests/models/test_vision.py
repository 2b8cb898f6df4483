"""The vision tower and the aligner against formulas written out patch by patch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from finback.base.runtime import ConfigError, RequestError
from finback.models.deepseek_v41.vision import Aligner, ViT

PATCH, DIM, HEADS, INTER, LAYERS, RATIO, TEXT_DIM = 2, 16, 2, 12, 2, 3, 10
Weights = dict[str, Tensor]


def tiny(dtype: torch.dtype = torch.float64) -> tuple[ViT, Aligner]:
    vit = ViT(n_layers=LAYERS, dim=DIM, n_heads=HEADS, inter_dim=INTER, patch_size=PATCH, rope_theta=10000.0)
    aligner = Aligner(vision_dim=DIM, dim=TEXT_DIM, downsample_ratio=RATIO)
    for module in (vit, aligner):
        for name, parameter in module.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return vit.to(dtype), aligner.to(dtype)


def oracle_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([row / math.sqrt(sum(v * v for v in row.tolist()) / len(row) + 1e-6) for row in x]) * weight


def oracle_rotate(head: Tensor, row: int, col: int) -> Tensor:
    """Channel i turns with channel i + h/2: the first half of these pairs by the row, the second half by the column."""
    half = len(head) // 2
    out = head.clone()
    for i in range(half):
        coordinate, j = (row, i) if i < half // 2 else (col, i - half // 2)
        angle = coordinate * 10000.0 ** (-2 * j / half)
        out[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
        out[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
    return out


def oracle_attention(x: Tensor, w: Weights, name: str, grid_w: int) -> Tensor:
    size = DIM // HEADS
    qkv = x @ w[f"{name}.wqkv.weight"].T + w[f"{name}.wqkv.bias"]
    out = torch.zeros_like(x)
    for head in range(HEADS):
        q, k, v = (qkv[:, part * DIM + head * size :][:, :size] for part in range(3))
        q, k = (torch.stack([oracle_rotate(row, *divmod(n, grid_w)) for n, row in enumerate(t)]) for t in (q, k))
        for n in range(len(x)):
            weights = [math.exp(float(q[n] @ k[m]) / math.sqrt(size)) for m in range(len(x))]
            out[n, head * size :][:size] = sum(p * v[m] for m, p in enumerate(weights)) / sum(weights)
    return out @ w[f"{name}.wo.weight"].T + w[f"{name}.wo.bias"]


def oracle_mlp(x: Tensor, w: Weights, name: str) -> Tensor:
    gate_up = x @ w[f"{name}.w1.weight"].T
    gate, up = gate_up[:, :INTER], gate_up[:, INTER:]
    return (gate / (1 + torch.exp(-gate)) * up) @ w[f"{name}.w2.weight"].T


def oracle_vit(patches: Tensor, w: Weights, grid_w: int) -> Tensor:
    x = patches.reshape(len(patches), -1) @ w["patch_embed.proj.weight"].T + w["patch_embed.proj.bias"]
    for i in range(LAYERS):
        block = f"blocks.{i}"
        x = x + oracle_attention(oracle_norm(x, w[f"{block}.norm1.weight"]), w, f"{block}.attn", grid_w)
        x = x + oracle_mlp(oracle_norm(x, w[f"{block}.norm2.weight"]), w, f"{block}.mlp")
    return oracle_norm(x, w["norm.weight"])


def oracle_aligner(x: Tensor, w: Weights, grid_h: int, grid_w: int) -> Tensor:
    rows = []
    for top in range(0, grid_h, RATIO):
        for left in range(0, grid_w, RATIO):
            joined = torch.zeros(DIM * RATIO * RATIO, dtype=torch.float64)
            for channel in range(DIM):
                for y in range(RATIO):
                    for z in range(RATIO):
                        if top + y < grid_h and left + z < grid_w:
                            source = x[(top + y) * grid_w + left + z, channel]
                            joined[channel * RATIO * RATIO + y * RATIO + z] = source
            rows.append(joined)
    hidden = torch.stack(rows) @ w["w1.weight"].T + w["w1.bias"]
    return hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))) @ w["w2.weight"].T + w["w2.bias"]


def double(module: torch.nn.Module) -> Weights:
    return {name: tensor.double() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str
)
@pytest.mark.parametrize("grid", [(1, 1), (3, 5), (4, 3), (5, 7)], ids=str)
def test_features_equal_the_written_out_formula(grid: tuple[int, int], dtype: torch.dtype, bar: float) -> None:
    """Catches rows and columns exchanged in the rotation, interleaved pairs, q/k/v or gate/up in another order, another
    feature order or another padded side in the aligner, tanh GELU, a causal mask, a missing bias."""
    grid_h, grid_w = grid
    vit, aligner = tiny(dtype)
    patches = torch.randn(grid_h * grid_w, 3, PATCH, PATCH, dtype=torch.float64)
    features = aligner(vit(patches, grid_h, grid_w), grid_h, grid_w)
    wanted = oracle_aligner(oracle_vit(patches, double(vit), grid_w), double(aligner), grid_h, grid_w)
    assert features.dtype == dtype
    assert features.shape == wanted.shape
    assert (features.double() - wanted).abs().max() <= bar * wanted.abs().max()


def test_norm_of_bfloat16_is_computed_in_float32() -> None:
    """Catches a norm whose sum or whose product with the weight is rounded to bfloat16 on the way: the result must be
    the exact one rounded once (0.501: float32 may fall on the other side of a tie)."""
    vit, _ = tiny(torch.bfloat16)
    x = torch.randn(64, DIM).bfloat16()
    exact = oracle_norm(x.double(), vit.norm.weight.double())
    half_ulp = torch.ldexp(torch.full_like(exact, 0.501), torch.frexp(exact).exponent - 8)
    assert ((vit.norm(x).double() - exact).abs() <= half_ulp).all()


def test_released_sizes_have_the_released_parameters() -> None:
    """Catches an extra or missing bias, a class token, position embeddings and misspelt names: the published checkpoint
    counts 485,268,480 parameters of vision, three delimiter vectors included."""
    with torch.device("meta"):
        vit = ViT(n_layers=32, dim=1024, n_heads=16, inter_dim=2816, patch_size=14, rope_theta=10000.0)
        aligner = Aligner(vision_dim=1024, dim=5120, downsample_ratio=3)
    parameters = [*vit.parameters(), *aligner.parameters()]
    assert sum(p.numel() for p in parameters) + 3 * 5120 == 485_268_480
    of_block = {name.removeprefix("blocks.31.") for name in vit.state_dict() if name.startswith("blocks.31.")}
    assert of_block == {
        *("norm1.weight", "norm2.weight", "mlp.w1.weight", "mlp.w2.weight"),
        *("attn.wqkv.weight", "attn.wqkv.bias", "attn.wo.weight", "attn.wo.bias"),
    }
    outside = {name for name in vit.state_dict() if not name.startswith("blocks.")}
    assert outside == {"patch_embed.proj.weight", "patch_embed.proj.bias", "norm.weight"}
    assert set(aligner.state_dict()) == {"w1.weight", "w1.bias", "w2.weight", "w2.bias"}


def test_gradients_after_inference() -> None:
    """Catches tables kept from a call under inference_mode (autograd refuses them later), and a step that cuts or bends
    the gradient."""
    vit, aligner = tiny()
    patches = torch.randn(4, 3, PATCH, PATCH, dtype=torch.float64, requires_grad=True)

    def forward(patches: Tensor) -> Tensor:
        return aligner(vit(patches, 2, 2), 2, 2)

    with torch.inference_mode():
        forward(patches)
    assert torch.autograd.gradcheck(forward, (patches,), fast_mode=True)
    forward(patches).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in (*vit.parameters(), *aligner.parameters()))


def test_grid_that_does_not_match_the_patches() -> None:
    """Catches a transposed or wrong grid that silently rotates every patch by another patch's place."""
    vit, _ = tiny()
    with pytest.raises(RequestError, match=r"6 patches .* 2 x 4 = 8"):
        vit(torch.zeros(6, 3, PATCH, PATCH), 2, 4)


def test_heads_that_cannot_turn_in_two_dimensions() -> None:
    """Catches a width whose heads are not multiples of 4, which would leave channels without a rotation."""
    with pytest.raises(ConfigError, match="width 12 with 2 heads"):
        ViT(n_layers=1, dim=12, n_heads=2, inter_dim=4, patch_size=2, rope_theta=10000.0)
