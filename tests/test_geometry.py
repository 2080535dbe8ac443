from __future__ import annotations

import pytest

from mmds.errors import ConfigError, DataError
from mmds.geometry import Geometry, ImagePlan

SIZES = [(1, 1), (1, 10_000), (10_000, 1), (3, 5), (336, 336), (4000, 3000), (640, 480)]


@pytest.mark.parametrize(
    ("image_size", "patch_size", "merge", "patches", "tokens"),
    [(336, 14, 1, 576, 576), (336, 14, 2, 576, 144), (224, 32, 1, 49, 49), (28, 14, 2, 4, 1)],
)
def test_published_models_have_their_known_numbers_of_patches_and_tokens(
    image_size: int, patch_size: int, merge: int, patches: int, tokens: int
) -> None:
    geometry = Geometry(mode="fixed", image_size=image_size, patch_size=patch_size, merge=merge)
    assert geometry.plan(640, 480) == ImagePlan(
        height=image_size, width=image_size, patches=patches, visual_tokens=tokens
    )


def test_every_source_size_gets_the_same_square_in_fixed_mode() -> None:
    geometry = Geometry(mode="fixed", image_size=336, patch_size=14)
    assert len({geometry.plan(width, height) for width, height in SIZES}) == 1


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, 5)])
def test_an_empty_image_is_refused_with_its_size(width: int, height: int) -> None:
    with pytest.raises(DataError, match=f"{width} x {height}"):
        Geometry(mode="fixed", image_size=28, patch_size=14).plan(width, height)


def test_a_size_off_the_patch_grid_is_refused_because_border_pixels_would_be_lost() -> None:
    with pytest.raises(ConfigError, match="384 is not a multiple of its patch size 14"):
        Geometry(mode="fixed", image_size=384, patch_size=14)


def test_an_odd_grid_cannot_be_merged() -> None:
    with pytest.raises(ConfigError, match="224 px / 32 px = 7"):
        Geometry(mode="fixed", image_size=224, patch_size=32, merge=2)


def test_a_mode_that_comes_later_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'native' is not yet supported"):
        Geometry(mode="native", image_size=28, patch_size=14)


def test_the_pixel_cap_holds_to_the_pixel() -> None:
    geometry = Geometry(mode="fixed", image_size=336, patch_size=14)
    geometry.check_cap(None)
    geometry.check_cap(336 * 336)
    with pytest.raises(ConfigError, match=r"max_pixels is 112895.*336 x 336 = 112896"):
        geometry.check_cap(336 * 336 - 1)
