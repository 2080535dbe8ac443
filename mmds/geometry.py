"""Image size -> resized size -> patches -> visual tokens, as integer functions.

The single source of these numbers: preparation, planner, collator, encoder and evaluation all call it, so a planned patch
is an encoded patch.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmds.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """What one image becomes. Heights and widths are pixels; tokens are what the decoder receives."""

    height: int
    width: int
    patches: int
    visual_tokens: int


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How a model turns an image of any size into patches and visual tokens.

    mode: `fixed` (every image is resized to one square, as in LLaVA-1.5).
    image_size: pixels a side that the encoder receives.
    patch_size: pixels a side of one patch.
    merge: neighbouring patches that the connector joins per side (1 = none, 2 = 2x2).
    """

    mode: str
    image_size: int
    patch_size: int
    merge: int = 1

    def __post_init__(self) -> None:
        if self.mode != "fixed":
            raise ConfigError(f"mmds.model.resolution: {self.mode!r} is not yet supported; use 'fixed'")
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"the encoder's image size {self.image_size} is not a multiple of its patch size {self.patch_size}: "
                "pixels at the border would be lost; choose a size on the patch grid"
            )
        if self.grid % self.merge:
            raise ConfigError(
                f"mmds.model.connector: merging {self.merge}x{self.merge} patches needs a grid side that is a multiple of "
                f"{self.merge}, but {self.image_size} px / {self.patch_size} px = {self.grid}; use 'mlp2x' or another image size"
            )

    @property
    def grid(self) -> int:
        """Patches a side."""
        return self.image_size // self.patch_size

    def plan(self, width: int, height: int) -> ImagePlan:
        """What an upright image of `width` x `height` pixels becomes. Raises DataError for an empty size."""
        if width < 1 or height < 1:
            raise DataError(f"an image of {width} x {height} pixels has no content")
        return ImagePlan(
            height=self.image_size,
            width=self.image_size,
            patches=self.grid**2,
            visual_tokens=(self.grid // self.merge) ** 2,
        )

    def check_cap(self, max_pixels: int | None) -> None:
        """Raise ConfigError when the encoder would receive more pixels for one image than `max_pixels`."""
        if max_pixels is not None and self.image_size**2 > max_pixels:
            raise ConfigError(
                f"mmds.data.max_pixels is {max_pixels}, but the encoder's fixed input of {self.image_size} x "
                f"{self.image_size} = {self.image_size**2} pixels is above it; raise max_pixels or choose another encoder"
            )
