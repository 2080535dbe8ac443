"""Put visual tokens into their slots of the token row, checked image by image.

Shapes: T tokens of a row, V slots of a row, I images of a row, d the decoder's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmds.errors import SpliceError


def check_counts(slot_counts: Sequence[int], visual_counts: Sequence[int], names: Sequence[str]) -> None:
    """Raise SpliceError unless image i has as many visual tokens as slots, naming sample, image and both counts."""
    if len(slot_counts) != len(visual_counts):
        raise SpliceError(
            f"{len(slot_counts)} images have slots in this row, but {len(visual_counts)} were encoded: {list(names)}"
        )
    for name, slots, visual in zip(names, slot_counts, visual_counts, strict=True):
        if slots != visual:
            raise SpliceError(
                f"{name}: {slots} slots in the token row but {visual} visual tokens from the connector; prepare and train must "
                "use the same encoder geometry"
            )


def splice(embeddings: Tensor, visual: Tensor, slots: Tensor) -> Tensor:
    """The row with its slots overwritten: embeddings [T, d], visual [V, d], slots int64 [V] -> [T, d].

    Both inputs stay in the graph also when V is 0, so that every rank back-propagates through every part. Raises SpliceError
    when the totals differ; nothing is cut or repeated.
    """
    if visual.shape[0] != slots.shape[0]:
        raise SpliceError(f"{slots.shape[0]} slots in the token row but {visual.shape[0]} visual tokens")
    return embeddings.index_put((slots,), visual.to(embeddings.dtype))
