from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mmds.errors import ConfigError
from mmds.model.attention import ROWS, rows_attention
from mmds.model.qualify import qualify
from tests.model.families import FAMILIES

SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

MORE_GOOD = {
    "Qwen2 with windows in its upper layers": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4096, max_window_layers=1
    ),
    "Gemma 3": lambda: transformers.Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 6}, head_dim=16),
    "Mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=2),
    "Cohere": lambda: transformers.CohereConfig(**SIZES),
}

# family: a small config, the name that the refusal must say, and the reason in it
REFUSED: dict[str, tuple[Any, str, str]] = {
    "Falcon ignores the registry": (
        lambda: transformers.FalconConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
        ),
        "falcon",
        "ignores the attention registry",
    ),
    "Bloom ignores the registry": (
        lambda: transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=128),
        "bloom",
        "ignores the attention registry",
    ),
    "Gemma 2 needs softcap": (
        lambda: transformers.Gemma2Config(**SIZES, head_dim=16),
        "gemma2",
        "softcap",
    ),
    "GptOss needs sinks": (
        lambda: transformers.GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
        "gpt_oss",
        "s_aux",
    ),
    "StableLM drops the boundaries": (
        lambda: transformers.StableLmConfig(**SIZES),
        "stablelm",
        "boundaries",
    ),
    "Llama 4 attends in chunks": (
        lambda: transformers.Llama4TextConfig(
            **{**SIZES, "num_hidden_layers": 4}, head_dim=16, num_local_experts=2, intermediate_size_mlp=96
        ),
        "llama4_text",
        "chunked_attention",
    ),
    "LFM2 has convolutions": (
        lambda: transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
        "lfm2",
        "conv",
    ),
    "Mamba has no attention": (
        lambda: transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=128),
        "mamba",
        "linear_attention",
    ),
    "Gemma 4 looks ids up again from embeddings": (
        lambda: transformers.Gemma4TextConfig(
            **{**SIZES, "num_hidden_layers": 6},
            global_head_dim=16,
            head_dim=16,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=128,
        ),
        "gemma4_text",
        "inputs_embeds",
    ),
    "BERT sees the future": (
        lambda: transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=128
        ),
        "bert",
        "not causal",
    ),
    "T5 is no causal language model": (
        lambda: transformers.T5Config(d_model=64),
        "t5",
        "AutoModelForCausalLM",
    ),
}


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_GOOD])
def test_a_family_that_packs_right_is_accepted_and_its_config_left_alone(family: str) -> None:
    config = {**FAMILIES, **MORE_GOOD}[family]()
    before = config.to_dict()
    qualify(config)
    assert config.to_dict() == before


@pytest.mark.parametrize("case", REFUSED)
def test_a_family_that_does_not_is_refused_by_name_with_the_reason(case: str) -> None:
    build, name, reason = REFUSED[case]
    config = build()
    before = config.to_dict()
    with pytest.raises(ConfigError, match=f"decoder family '{name}'") as error:
        qualify(config)
    assert reason in str(error.value)
    assert config.to_dict() == before


def test_a_config_of_real_size_takes_no_full_size_model(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []
    build = AutoModelForCausalLM.from_config

    def spy(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        largest.append(sum(p.numel() for p in model.parameters()))
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", spy)
    sizes = dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4)
    qualify(transformers.Qwen2Config(**sizes, num_hidden_layers=28, vocab_size=152064))
    assert largest
    assert max(largest) < 30e6


class ScalarConfig(LlamaConfig):
    model_type = "scalar_gate"


class ScalarForCausalLM(LlamaForCausalLM):
    """A Llama with a gate of dimension 0, which ZeRO cannot partition."""

    config_class = ScalarConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.tensor(1.0))


class ShiftConfig(LlamaConfig):
    model_type = "token_shift"


class _Shift(nn.Module):
    """Adds the token before: a mix outside attention that knows no boundaries."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


class ShiftForCausalLM(LlamaForCausalLM):
    """A Llama that mixes neighbouring tokens before its first block."""

    config_class = ShiftConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].input_layernorm = _Shift(self.model.layers[0].input_layernorm)


@pytest.fixture(scope="module", autouse=True)
def invented_families() -> None:
    """Both families, known to transformers' auto classes."""
    for config, model in ((ScalarConfig, ScalarForCausalLM), (ShiftConfig, ShiftForCausalLM)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)


def test_a_parameter_of_dimension_zero_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="scalar_gate.*0-dimensional.*gate"):
        qualify(ScalarConfig(**SIZES))


def test_a_family_that_mixes_tokens_outside_attention_is_refused_as_leaking() -> None:
    with pytest.raises(ConfigError, match="token_shift.*leaks"):
        qualify(ShiftConfig(**SIZES))


def test_the_backend_and_the_random_state_are_as_before_afterwards() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for build in (FAMILIES["llama"], REFUSED["Gemma 2 needs softcap"][0]):
        try:
            qualify(build())
        except ConfigError:
            continue
    assert torch.equal(torch.rand(3), expected)
    assert AttentionInterface()[ROWS] is rows_attention


def test_a_quantised_decoder_is_refused_in_one_line() -> None:
    config = LlamaConfig(**SIZES, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ConfigError, match="llama decoder is quantised .* QLoRA is not supported") as error:
        qualify(config)
    assert "\n" not in str(error.value)
