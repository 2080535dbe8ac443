"""How preparation scales from one process to two, beside how bare JPEG decoding does in the same run.

    python scripts/bench_prepare.py --samples 20000

Prints samples a second of both, the gain of each, and their ratio; 1.0 means that preparation loses nothing
of what the machine can give. Times are the best of --repeat rounds, the four measurements taken in turn.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.prepare import prepare
from mmds.data.workers import in_order

PICTURES = 256  # different ones; more would only measure the disk
SIDE = (640, 480)  # pixels, width and height
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def main() -> None:
    """Make the set, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), chat_tokenizer()
        raw, chosen = write_set(folder, options.samples)
        prepare_with = {n: lambda n=n: prepare_once(raw, folder / "out", tokenizer, n) for n in (1, 2)}
        decode_with = {n: lambda n=n: decode_all(chosen, n) for n in (1, 2)}
        best: dict[tuple[str, int], float] = {}
        for _ in range(options.repeat):
            for kind, jobs in (("decode", decode_with), ("prepare", prepare_with)):
                for n, job in jobs.items():
                    best[kind, n] = min(best.get((kind, n), np.inf), seconds(job))
    gains = {kind: best[kind, 1] / best[kind, 2] for kind in ("decode", "prepare")}
    for kind, gain in gains.items():
        rates = [options.samples / best[kind, n] for n in (1, 2)]
        print(f"{kind:8} {rates[0]:8.1f} -> {rates[1]:8.1f} samples/s from 1 to 2 processes: x {gain:.2f}")
    print(f"prepare / decode: {gains['prepare'] / gains['decode']:.3f}")


def write_set(folder: Path, samples: int) -> tuple[Path, list[Path]]:
    """A raw file of one-picture samples, and the picture of each."""
    draw = np.random.default_rng(0)
    files = [folder / f"{i}.jpg" for i in range(min(PICTURES, samples))]
    for path in files:
        coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(SIDE, Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = np.clip(smooth + draw.normal(0, 8, smooth.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(path, quality=90)
    chosen = [files[i % len(files)] for i in range(samples)]
    lines = []
    for i, path in enumerate(chosen):
        question = {"from": "human", "value": f"<image>\nWhat is shown in picture {i}?"}
        answer = {"from": "gpt", "value": "A picture of many colours that run into each other. " * 3}
        lines.append(
            json.dumps({"id": str(i), "image": path.name, "conversations": [question, answer]}) + "\n"
        )
    raw = folder / "raw.jsonl"
    raw.write_text("".join(lines), encoding="utf-8")
    return raw, chosen


def chat_tokenizer() -> ChatTokenizer:
    """A byte-level tokenizer with ChatML, made here: nothing is downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHATML
    return ChatTokenizer(tokenizer)


def prepare_once(raw: Path, out: Path, tokenizer: ChatTokenizer, workers: int) -> None:
    """One whole preparation."""
    shutil.rmtree(out, ignore_errors=True)
    prepare([raw], None, tokenizer, out, workers=workers)


def decode_all(files: Sequence[Path], workers: int) -> None:
    """Read and decode every picture, and nothing else."""
    chunks = [files[i : i + 16] for i in range(0, len(files), 16)]
    for _ in in_order(decode, chunks, None, workers):
        pass


def decode(files: Sequence[Path], _: None) -> None:
    """Decode some pictures."""
    for path in files:
        Image.open(io.BytesIO(path.read_bytes())).load()


def seconds(job: Callable[[], None]) -> float:
    """Wall-clock time of a job."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
