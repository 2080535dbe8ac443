"""The last blocks of a tower, which `mmds.stage.encoder_blocks` trains while the rest of the encoder is frozen."""

from __future__ import annotations

from mmds.errors import ConfigError
from mmds.model.encoder import Encoder, tower_blocks


def last_blocks(encoder: Encoder, count: int | None) -> list[str]:
    """Patterns of the parameters of the last `count` blocks below the feature layer, in order; none without a count.

    Raises ConfigError when the tower has fewer blocks, or none that are known.
    """
    if count is None:
        return []
    blocks = tower_blocks(encoder.visual)
    if count > len(blocks):
        most = (
            f"has {len(blocks)} blocks up to its feature layer" if blocks else "has no blocks that are known"
        )
        value = len(blocks) or "null"
        raise ConfigError(
            f"mmds.stage.encoder_blocks: {count} blocks are to train, but the encoder {encoder.spec.name} {most}; override with\n"
            f"    --set mmds.stage.encoder_blocks={value}"
        )
    names = {id(module): name for name, module in encoder.named_modules()}
    return [f"encoder.{names[id(block)]}.*" for block in blocks[-count:]]
