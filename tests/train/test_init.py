"""Fresh weights: each test is a start that looked harmless and cost a training run."""

from __future__ import annotations

import torch

from finback import kernels
from finback.nn.rows import BatchRows, Chunk, ForwardBatch
from finback.nn.tape import Tape


def forward(model, ids, **tape):
    batch = ForwardBatch([Chunk(ids)], tape=Tape(**tape))
    return model(batch, BatchRows(model.row_groups()).view(batch)), batch


def plain_residual(model, ids):
    """The same sublayers around one ordinary residual stream."""
    from finback.models.deepseek_v41.attention import LayerShare, Step
    from finback.nn.norm_rope import turns_at

    batch = ForwardBatch([Chunk(ids)])
    turns = [turns_at(batch.positions, f, model.dtype) for f in (model.window_freqs, model.compressed_freqs)]
    step = Step(BatchRows(model.row_groups()).view(batch), *turns, model.compressed_freqs, model.dtype)
    x, share = model.embed(batch.ids), LayerShare()
    for layer in model.layers:
        y, share = layer.attn(layer.attn_norm(x), step, share)
        x = x + y
        x = x + layer.ffn(layer.ffn_norm(x), None, batch.tape, f"layer{layer.layer}")
    return model.norm(x)


def test_hyper_connections_start_as_an_ordinary_residual(tiny_model, rng):
    """Zeros make every sublayer read the mean of the copies; a `pre` that is not shifted by one sublayer reads none."""
    model = tiny_model("v41", torch.float64)
    ids = torch.randint(0, 48, (30,), generator=rng).tolist()
    with torch.no_grad():
        found, _ = forward(model, ids)
        assert torch.allclose(found, plain_residual(model, ids), atol=5e-2)
        for layer in model.layers:  # what depends on the input is small; without it the two are equal
            layer.hc_attn.fn.zero_()
            layer.hc_ffn.fn.zero_()
        found, _ = forward(model, ids)
        assert torch.allclose(found, plain_residual(model, ids), atol=1e-4)


def test_each_sublayer_reads_its_own_copy(tiny_model, rng):
    """With all copies read alike they get equal gradients and stay equal for ever. The first sublayer takes copy 0, so
    the bases of sublayer s must open copy s + 1."""
    model = tiny_model("v41", torch.float64)
    _, batch = forward(model, torch.randint(0, 48, (5,), generator=rng).tolist(), trace=True)
    for layer in range(5):
        pre = batch.tape.seen[f"layer{layer}.next_pre"]
        assert pre.argmax(dim=1).unique().tolist() == [(2 * layer + 2) % 4]
        attn = model.layers[layer].hc_attn.base[:4]
        assert int(attn.argmax()) == (2 * layer + 1) % 4 and attn.sort().values[-2] < 0 < attn.max()


def test_engram_adds_nothing_at_first_but_can_learn(tiny_model, rng):
    """A random value path disturbs every token from the first step on; tables of zeros would put 1 / sqrt(eps) on the
    key's path; and a value path that can never move is no memory."""
    model = tiny_model("v41")
    engram = model.engrams["1"]
    streams = torch.randn(7, 4, 32, generator=rng)
    rows = torch.randint(0, engram.embed.rows, (7, 4), generator=rng)
    assert torch.equal(engram(streams, rows, None), streams)
    assert 0.01 < float(engram.embed.weight.detach().std()) < 0.03
    engram(streams, rows, None).square().sum().backward()
    assert float(engram.wkv.weight.grad[4 * 32 :].abs().sum()) > 0


def test_scale_of_matrices_and_of_the_rest(tiny_model):
    """Matrices keep a quarter of the variance and have no outliers, norms pass on, sinks and biases are neutral."""
    model = tiny_model("v41")
    matrix = model.layers[0].attn.wq_a.weight
    std = 0.5 / 32**0.5
    assert 0.8 * std < float(matrix.detach().std()) < 1.0 * std and float(matrix.detach().abs().max()) <= 2 * std
    block = model.layers[0]
    assert torch.equal(block.attn_norm.weight, torch.ones(32)) and not block.attn.attn_sink.any()
    assert not block.ffn.gate.bias.any()
    sink = kernels.hc_mixes(torch.zeros(1, 4, 32), block.hc_attn.fn, block.hc_attn.scale, block.hc_attn.base,
                            iterations=4, norm_eps=1e-6, eps=1e-6)  # fmt: skip
    assert torch.allclose(sink[1], torch.ones(1, 4))


def test_every_parameter_is_filled_and_the_seed_decides(tiny_model):
    """`to_empty` leaves garbage behind wherever the rules forget a tensor: NaN shows it here."""
    for name in ("v41", "v32", "spikewhale"):
        first, second = tiny_model(name), tiny_model(name)
        with torch.no_grad():
            for value in second.state_dict().values():
                value.fill_(float("nan")) if value.is_floating_point() else None
        from finback.train.init import initialise

        initialise(second, 5)
        initialise(first, 5)
        for key, value in first.state_dict().items():
            assert torch.equal(value, second.state_dict()[key]), (name, key)
