"""The whole network: encoder, connector, decoder, joined by the splice.

Every part is called exactly once for a row, with or without images: under ZeRO-3 ranks meet inside each layer, so a rank that
skipped its encoder would stall the others (or corrupt them in silence). Shapes: T tokens of a row, I images, P patches of its
images, V visual tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmds.data.rows import Row
from mmds.errors import DataError
from mmds.model.connector import Connector
from mmds.model.decoder import Decoder
from mmds.model.encoder import Encoder
from mmds.model.loss import targets, token_nll, weighted_sum
from mmds.model.splice import check_counts, splice


class Mllm(nn.Module):
    """Trainable tree of a run: connector and decoder, and the encoder only where the stage trains it.

    A frozen encoder is given as `features` instead (see FrozenEncoder): it stays outside the tree, replicated, without collectives.
    """

    def __init__(
        self, *, connector: Connector, decoder: Decoder, encoder: Encoder | None, weighting: str = "token"
    ) -> None:
        """weighting: of samples in the loss, see `mmds.model.loss.sample_weights`."""
        super().__init__()
        self.weighting = weighting
        self.encoder = encoder
        self.connector = connector
        self.decoder = decoder

    def forward(self, row: Row, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The row's weighted sum of token NLL, to be back-propagated, and its plain sum without a graph; both fp32, 0-dim.

        row: on the model's device. features [P, c] of a frozen encoder; None when the encoder trains.
        """
        keep, target = targets(row.labels, row.cu_seqlens)
        nll = token_nll(self.logits(row, keep, features), target)
        return weighted_sum(nll, row.supervised_counts, self.weighting), nll.detach().sum()

    def logits(self, row: Row, keep: Tensor, features: Tensor | None = None) -> Tensor:
        """Logits [K, vocabulary] at row positions `keep` int64 [K]."""
        return self.decoder(
            inputs_embeds=self.embed(row, features),
            position_ids=row.position_ids,
            cu_seqlens=row.cu_seqlens,
            keep=keep,
        )

    def embed(self, row: Row, features: Tensor | None = None) -> Tensor:
        """Embeddings [T, d] of the row with visual tokens in their slots."""
        if (features is None) == (self.encoder is None):
            raise ValueError("give features exactly when the encoder is frozen, that is outside the model")
        if features is None:
            assert self.encoder is not None
            features = encode(self.encoder, row)
        if not row.plans:  # the dummy's gradient is 0 times its features, which must not be infinite
            features = features.nan_to_num(0.0, 0.0, 0.0)
        visual = self.connector(features, row.plans or (row.dummy,))
        check_counts(row.slot_counts.tolist(), [plan.visual_tokens for plan in row.plans], row.image_names)
        real = visual if row.plans else visual[:0]
        return splice(self.decoder.embed(row.input_ids), real, row.slots)


class FrozenEncoder:
    """A frozen encoder outside the module tree: eval mode, no gradient, one call a row, replicated on every rank."""

    def __init__(self, encoder: Encoder, *, device: torch.device, dtype: torch.dtype) -> None:
        self.encoder = encoder.to(device=device, dtype=dtype).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, row: Row) -> Tensor:
        """Features [P, c]. Raises DataError naming sample and image when one is not finite."""
        features = encode(self.encoder, row)
        refuse_non_finite(features, row)
        return features


def encode(encoder: Encoder, row: Row) -> Tensor:
    """Features [P, c] of the row's images, or of its dummy, one black piece that fills no slot, when it has none."""
    plans, pixels = row.plans, row.pixels
    if not plans:
        plans, pixels = (row.dummy,), row.pixels.new_zeros(row.dummy.pixel_shape)
    grids = [plan.grid for plan in plans for _ in range(plan.pieces)] if plans[0].packed else None
    features: Tensor = encoder(pixels, grids)
    return features


def refuse_non_finite(features: Tensor, row: Row) -> None:
    """Raise DataError naming the images whose features hold an infinity or a NaN (fp16-trained encoders overflow on some)."""
    if not row.plans or bool(features.isfinite().all()):
        return
    each = features.isfinite().all(1).split([plan.patches for plan in row.plans])
    names = [name for name, fine in zip(row.image_names, each, strict=True) if not bool(fine.all())]
    raise DataError(
        f"the encoder gave non-finite features for {', '.join(names)}; use bf16 or fp32, or remove these images"
    )
