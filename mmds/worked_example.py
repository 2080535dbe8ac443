"""Why equal tokens are not equal work, in one example with its arithmetic: two rows of about 3,600 tokens, tenfold apart in the encoder."""

from __future__ import annotations

from mmds.architecture import ConnectorShape, DecoderShape, EncoderShape, Linear, ModelShape
from mmds.cost import cost_model, row_sums, whole_parts

VIT_L = EncoderShape(blocks=24, width=1024, mlp=4096, heads=16, head=64, patch=14, prefix=1)
"""ViT-L/14 of CLIP, 304e6 parameters."""

DECODER = DecoderShape(
    layers=32, hidden=4096, heads=32, kv_heads=32, head=128, intermediate=11008, vocabulary=32000
)
"""Llama-2-7B."""

CONNECTOR = ConnectorShape(
    linears=(
        Linear(per="patch", inputs=1024, outputs=4096, first=True, activated=True),
        Linear(per="patch", inputs=4096, outputs=4096),
    )
)

ROWS = {
    "4 images of 336 x 336 px": ([576] * 4, 3504),
    "2 images of 1344 x 896 px": ([6144] * 2, 3672),
}
"""Patches of 14 px of each image, and tokens of the row: 4 x 576 visual ones and 1,200 of text; 2 x 1,536, four patches each, and 600."""


def worked_example() -> str:
    """The example as text. The encoder is frozen (one forward pass), connector and decoder train (three)."""
    shape = ModelShape(encoder=VIT_L, connector=CONNECTOR, decoder=DECODER)
    model = cost_model(shape, whole_parts(encoder=False, connector=True, decoder=True))
    lines = [
        "ViT-L/14: 24 blocks, width c = 1024, MLP 4c. Forward, an image of n patches:",
        "  patch convolution   2 n 3 14^2 c",
        "  matrices            2 (n + 1) 12 c^2 a block",
        "  attention           4 (n + 1)^2 c a block",
        "",
        f"{'row':<28}{'patches':>9}{'tokens':>9}{'encoder':>12}{'of it attention':>18}{'decoder x 3':>14}{'encoder share':>15}",
    ]
    encoders = []
    for name, (patches, tokens) in ROWS.items():
        flops = model.flops(row_sums(patches=patches, segments=[tokens], supervised=0))
        encoder, decoder = float(flops.encoder), float(flops.decoder)
        attention = sum(24 * 4 * (n + 1) ** 2 * 1024 for n in patches)
        encoders.append(encoder)
        lines.append(
            f"{name:<28}{sum(patches):>9,}{tokens:>9,}{encoder:>12.2e}{attention / encoder:>18.0%}{decoder:>14.2e}"
            f"{encoder / (encoder + decoder):>15.1%}"
        )
    lines += [
        "",
        f"Tokens differ by {3672 / 3504 - 1:.0%}, encoder work {encoders[1] / encoders[0]:.1f}-fold: a plan by tokens calls these rows equal. Where the encoder trains it",
        "counts three times, and under ZeRO-3 every other rank waits for it in each of its layers.",
    ]
    return "\n".join(lines)
