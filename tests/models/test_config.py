"""Reading config.json: what is in the file is what is used, and what cannot be used is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from finback.base.runtime import ConfigError
from finback.models.base import compute_dtype, family, read_fields
from finback.models.deepseek_v41.config import DeepseekV41Config
from finback.models.deepseek_v41.model import DeepseekV41


@pytest.fixture
def config(lab: Any) -> dict[str, Any]:
    """A tiny config.json with a quantization_config."""
    return lab.config() | {
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        }
    }  # fmt: skip


def as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [as_json(v) for v in value] if isinstance(value, tuple) else value


def given_values(read: Any, given: Any) -> Any:
    """`read` reduced to the keys of `given`."""
    return {k: given_values(read[k], v) for k, v in given.items()} if isinstance(given, dict) else read


def test_values_in_use_are_those_of_the_file(config: dict[str, Any]) -> None:
    """A key that is read under another name or replaced by a default: another model without any error. Every number of
    the file is changed here, so that no default can stand in for it."""
    config["text_config"].update(
        routed_scaling_factor=2.25, swiglu_limit=7.0, rms_norm_eps=1e-5, rope_theta=12345.0, hc_eps=1e-4,
        compress_rope_theta=54321.0, hc_sinkhorn_iters=7, engram_pad_token_id=1, norm_topk_prob=False,
        scoring_func="sigmoid",
    )  # fmt: skip
    config["vision_config"]["rope_theta"] = 77.0
    parsed = as_json(DeepseekV41Config.from_dict(config))
    assert given_values(parsed, config) == config


def test_released_bookkeeping_is_no_setting(config: dict[str, Any]) -> None:
    """Keys that say nothing about the forward are dropped; the older spelling of dtype is understood."""
    extra = {
        "transformers_version": "5.1",
        "_name_or_path": "x",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_cache": True,
    }
    parsed = DeepseekV41Config.from_dict(config | extra | {"torch_dtype": "float16"})
    assert parsed.dtype == "float16"
    assert dataclasses.replace(parsed, dtype=config["dtype"]) == DeepseekV41Config.from_dict(config)


def test_the_list_of_ratios_may_leave_out_drafts(config: dict[str, Any]) -> None:
    """Published configs have an entry for each draft stage, others one for each layer."""
    config["text_config"]["compress_ratios"] = [0, 2, 2, 1, 1]
    assert DeepseekV41Config.from_dict(config).text_config.compress_ratios == (0, 2, 2, 1, 1)


def test_sources_of_each_layer(config: dict[str, Any]) -> None:
    """A layer reads the rows of the last source up to itself, and uses its own selection where it makes one."""
    text = DeepseekV41Config.from_dict(config).text_config
    assert [text.kv_source(i) for i in range(1, 5)] == [1, 1, 3, 3]
    assert [text.index_source(i) for i in range(1, 5)] == [1, 1, 3, 4]


def remove(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """put("a", "b", value): config["a"]["b"] = value. put("a", {"b": value}) is the same, for several keys."""
    *keys, changes = path if isinstance(path[-1], dict) else (*path[:-2], {path[-2]: path[-1]})

    def change(config: dict[str, Any]) -> None:
        for key in keys:
            config = config[key]
        config.update(changes)

    return change


TEXT, QUANT, VISION = "text_config", "quantization_config", "vision_config"
BAD = {
    "unknown key": (put(TEXT, "slidng_window", 8), ["'slidng_window'", "did you mean 'sliding_window'"]),
    "unknown key at the top": (put("imagetoken_id", 3), ["'imagetoken_id'", "did you mean 'image_token_id'"]),
    "unknown key deep inside": (put(TEXT, "rope_scaling", "facter", 3), ["rope_scaling", "'facter'", "'factor'"]),
    "unknown key like nothing": (put("zzz", 3), ["unknown key 'zzz'"]),
    "missing": (remove(TEXT, "head_dim"), ["text_config", "missing key head_dim"]),
    "no text_config": (remove(TEXT), ["missing key text_config"]),
    "string for a number": (put(TEXT, "hidden_size", "64"), ["hidden_size", "'64'", "int"]),
    "bool for a number": (put(TEXT, "hidden_size", True), ["hidden_size", "True", "int"]),
    "fraction for a number": (put(TEXT, "index_topk", 4.5), ["index_topk", "4.5", "int"]),
    "number for a list": (put(TEXT, "compress_ratios", 2), ["compress_ratios", "2"]),
    "number for a bool": (put(TEXT, "norm_topk_prob", 1), ["norm_topk_prob", "bool"]),
    "too few ratios": (put(TEXT, "compress_ratios", [0, 2, 2, 1]), ["compress_ratios has 4 entries for 5 layers"]),
    "compressed draft": (put(TEXT, "compress_ratios", [0, 2, 2, 1, 1, 1, 0]), ["draft stages must have"]),
    "no source": (put(TEXT, "kv_source_layer_ids", [3]), ["layer 1 compresses 2:1", "kv_source_layer_ids"]),
    "no selection": (put(TEXT, "index_source_layer_ids", [3, 4]), ["layer 1", "index_source_layer_ids"]),
    "source of another ratio": (
        put(TEXT, "kv_source_layer_ids", [1]), ["layer 3 has ratio 1 but its source 1 has ratio 2"],
    ),
    "stale selection": (
        put(TEXT, "index_source_layer_ids", [1, 4]), ["layer 3 has ratio 1 but its source 1 has ratio 2"],
    ),
    "selection older than the rows": (
        put(TEXT, {"compress_ratios": [0, 2, 2, 2, 2, 0, 0], "index_source_layer_ids": [1, 4]}),
        ["layer 3 reads rows of layer 3 with an older selection, of layer 1"],
    ),
    "uncompressed source": (put(TEXT, "kv_source_layer_ids", [0, 1, 3]), ["[0, 1, 3] names a layer without"]),
    "repeated sources": (put(TEXT, "index_source_layer_ids", [1, 3, 3, 4]), ["must ascend, got [1, 3, 3, 4]"]),
    "candidate source": (put(TEXT, "candidate_source_layer_id", 2), ["candidate_source_layer_id 2 is no index source"]),
    "few candidates": (put(TEXT, "candidate_topk_blocks", 1), ["2 candidate rows are fewer than index_topk 4"]),
    "heads and groups": (put(TEXT, "o_groups", 3), ["o_groups must divide"]),
    "odd rope": (put(TEXT, "qk_rope_head_dim", 15), ["qk_rope_head_dim must be even"]),
    "wide rope": (put(TEXT, "qk_rope_head_dim", 34), ["qk_rope_head_dim exceeds"]),
    "two shared experts": (put(TEXT, "n_shared_experts", 2), ["n_shared_experts 2"]),
    "two kv heads": (put(TEXT, "num_key_value_heads", 2), ["num_key_value_heads 2"]),
    "scores": (put(TEXT, "scoring_func", "softplus"), ["scoring_func 'softplus'"]),
    "top-k method": (put(TEXT, "topk_method", "greedy"), ["topk_method 'greedy'", "noaux_tc"]),
    "more experts than there are": (put(TEXT, "num_experts_per_tok", 9), ["num_experts_per_tok must be 1.."]),
    "no window": (put(TEXT, "sliding_window", 0), ["at least 1"]),
    "other scaling": (put(TEXT, "rope_scaling", "type", "linear"), ["'linear'", "'yarn'"]),
    "tables": (put(TEXT, "engram_num_embeddings", [660]), ["2 engram_layer_ids but 1 engram_num_embeddings"]),
    "draft targets": (put(TEXT, "dspark_target_layer_ids", [2, 5]), ["dspark_target_layer_ids name missing layers"]),
    "no draft targets": (put(TEXT, "dspark_target_layer_ids", []), ["DSpark needs dspark_target_layer_ids"]),
    "noise token": (put(TEXT, "dspark_noise_token_id", 512), ["dspark_noise_token_id is outside"]),
    "image token missing": (remove("image_token_id"), ["image_token_id is missing"]),
    "image token outside": (put("image_token_id", 512), ["image_token_id 512 is outside the vocabulary of 512"]),
    "quantisation method": (put(QUANT, "quant_method", "gptq"), ["'gptq'", "'fp8'"]),
    "block size": (put(QUANT, "weight_block_size", [128, 128]), ["(128, 128)", "[32, 32]"]),
    "scale format": (put(QUANT, "scale_fmt", "float"), ["'float'", "'ue8m0'"]),
    "expert format": (put(QUANT, "expert_dtype", "int4"), ["'int4'", "'fp4' or 'fp8'"]),
    "indivisible width": (put(TEXT, "moe_intermediate_size", 48), ["multiples of 32", "48"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_named(config: dict[str, Any], name: str) -> None:
    """A setting that is silently ignored, or found to be wrong by a shape error deep in the model."""
    change, words = BAD[name]
    change(config)
    with pytest.raises(ConfigError) as error:
        DeepseekV41.from_config(config, dtype=torch.float32)
    for word in words:
        assert word in str(error.value)


def test_tables_of_another_size_are_refused_by_the_model(config: dict[str, Any]) -> None:
    """The number of rows follows from primes: a table of another size would be read at unrelated rows."""
    config["text_config"]["engram_num_embeddings"] = [660, 865]
    with torch.device("meta"), pytest.raises(ConfigError, match="864"):
        DeepseekV41.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (range(100), "100 entries"),
        ([0] * 511 + [10**6], "1000000"),
        ([0] * 511 + [-1], "needs 512"),
    ],
    ids=["short", "large", "negative"],
)
def test_token_maps_must_fit(lab: Any, entries: Any, words: str) -> None:
    """Ids beyond the map, or compressed ids beyond the hash's range, would index memory of something else."""
    with pytest.raises(ConfigError, match=words):
        lab.copy_of(lab.model()).set_token_map(list(entries))


def test_a_model_without_its_token_map_says_so(lab: Any) -> None:
    """Hashing raw ids instead of compressed ones reads rows that were never trained for them."""
    model = lab.copy_of(lab.model())
    model.token_map = None
    with pytest.raises(ConfigError, match="set_token_map"):
        lab.feed(model, [lab.illustrated(model, 3)])


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("deepseek_v4", "did you mean"),
        ("deepseekv41", "did you mean 'deepseek_v41'"),
        ("llama", "this build runs"),
        (None, "None"),
    ],
)
def test_other_families_are_refused(kind: str | None, hint: str) -> None:
    """Weights of another model under names that happen to fit."""
    with pytest.raises(ConfigError, match="model_type") as error:
        family({} if kind is None else {"model_type": kind})
    assert hint in str(error.value)


def test_rounding_follows_the_checkpoint_unless_told(config: dict[str, Any]) -> None:
    """Rounding is a policy: on by default exactly where weights are quantised, and always as asked for."""
    plain = {k: v for k, v in config.items() if k != QUANT}
    with torch.device("meta"):
        for given, rounding, expected in [
            (config, None, True), (plain, None, False), (config, False, False), (plain, True, True),
        ]:  # fmt: skip
            model = DeepseekV41.from_config(given, dtype=torch.bfloat16, rounding=rounding)
            assert model.rounding is expected
            assert (model.layers[0].attn.wq_a.rounds is not None) is expected
            assert torch.get_default_dtype() == torch.float32, "a constructor must not leave global state changed"


def test_dtypes_by_name() -> None:
    """float16 overflows in this model, and a typing mistake must not fall back to something."""
    assert compute_dtype("float64") == torch.float64 and compute_dtype(torch.bfloat16) == torch.bfloat16
    with pytest.raises(ConfigError, match="'float16' is not supported; use one of float64, float32, bfloat16"):
        compute_dtype("float16")


def test_fields_of_a_dataclass() -> None:
    """Lists become tuples, whole numbers become floats where floats are meant, and None only where it is allowed."""

    @dataclasses.dataclass(frozen=True)
    class Some:
        number: float
        names: tuple[str, ...] = ()
        maybe: int | None = 3

    # `read_fields` resolves annotations, which are strings here.
    Some.__annotations__ = {"number": float, "names": tuple[str, ...], "maybe": int | None}
    some = read_fields(Some, {"number": 2, "names": ["a"], "maybe": None}, "x")
    assert some == Some(2.0, ("a",), None) and isinstance(some.number, float)
    with pytest.raises(ConfigError, match="number: None"):
        read_fields(Some, {"number": None}, "x")
    with pytest.raises(ConfigError, match="names: 3 is not of type str"):
        read_fields(Some, {"number": 2, "names": ["a", 3]}, "x")
