"""Seconds per FLOP of each part of a run, measured on its machine (`scripts/calibrate.py`), for the planner to use in place of FLOPs.

A FLOP of attention, of a large matrix and of the head take different times, so rows of equal FLOPs are not rows of equal time. Six
kinds of work have a rate each, and what is not proportional to FLOPs is an overhead in seconds. Time is linear in all of them:

    seconds = sum over kinds (rate x FLOPs) + row + piece x pieces

Fitted by non-negative least squares of the relative error, so that a short row counts as much as a long one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmds.cost import CostModel, Sums, Terms
from mmds.errors import ConfigError

Floats = npt.NDArray[np.float64]

RATES = ("encoder", "encoder_attention", "connector", "decoder", "decoder_attention", "head")
"""Kinds of work, seconds per FLOP each."""

OVERHEADS = ("row", "piece")
"""Seconds of each row, and of each encoder input."""

COLUMNS = (*RATES, *OVERHEADS)

FOLDS = 5
"""Of the cross-validation that decides which overheads are fitted."""

GAIN = 0.02
"""Share of its error that an overhead must remove from held-out rows to be fitted."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Rates of one machine, dtype and kind of model, and what they were measured on.

    Seconds per FLOP: encoder (matrices), encoder_attention, connector, decoder (matrices), decoder_attention, head. Seconds: row (of each
    row), piece (of each encoder input). device, dtype, torch: what it was measured on. rows: that were fitted. error: mean relative
    error of rows that were not.
    """

    encoder: float
    encoder_attention: float
    connector: float
    decoder: float
    decoder_attention: float
    head: float
    row: float
    piece: float
    device: str
    dtype: str
    torch: str
    rows: int
    error: float

    def apply(self, model: CostModel) -> CostModel:
        """The same model in seconds. Its parts do not hold `row`, which every row costs alike, with images or without."""
        return CostModel(
            encoder=Terms(
                pieces=self.encoder * model.encoder.pieces + self.piece,
                patches=self.encoder * model.encoder.patches,
                patch_squares=self.encoder_attention * model.encoder.patch_squares,
            ),
            connector=Terms(
                **{name: self.connector * value for name, value in asdict(model.connector).items()}
            ),
            decoder=Terms(
                tokens=self.decoder * model.decoder.tokens,
                squares=self.decoder_attention * model.decoder.squares,
                supervised=self.head * model.decoder.supervised,
            ),
        )

    def seconds(self, model: CostModel, sums: Sums) -> Floats:
        """Forward and backward of rows with these sums, `row` included. model: in FLOPs."""
        return self.apply(model).flops(sums).total + self.row

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """The inverse of `save`. Raises ConfigError naming file and key for anything unreadable, missing, unknown, negative or not finite."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _refused(path, f"cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise _refused(path, "is no JSON object")
        kinds = {field.name: field.type for field in fields(Calibration)}
        for key in data:
            if key not in kinds:
                raise _refused(path, f"{key} is not a key of a calibration")
        for key, kind in kinds.items():
            if key not in data:
                raise _refused(path, f"{key} is missing")
            _check(path, key, data[key], text=kind == "str")
        return Calibration(**data)


def _check(path: str | Path, key: str, value: object, *, text: bool) -> None:
    """One value of a file: a text, or a finite number of at least 0."""
    if text:
        if not isinstance(value, str):
            raise _refused(path, f"{key} is {value!r}, not a text")
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:  # type: ignore[operator,arg-type]
        raise _refused(path, f"{key} is {value!r}, not a finite number of at least 0")


def _refused(path: str | Path, reason: str) -> ConfigError:
    return ConfigError(
        f"calibration {path}: {reason}; measure it again with scripts/calibrate.py --config RUN.json -o {path}"
    )


def work(model: CostModel, sums: Sums) -> Floats:
    """What a calibration is linear in: float64 [rows, COLUMNS], FLOPs of each kind, and 1 and the number of pieces for the overheads."""
    encoder, decoder = model.encoder, model.decoder
    columns = [
        encoder.patches * sums.patches + encoder.pieces * sums.pieces,
        encoder.patch_squares * sums.patch_squares,
        model.connector.of(sums),
        decoder.tokens * sums.tokens,
        decoder.squares * sums.squares,
        decoder.supervised * sums.supervised,
        np.ones(np.shape(sums.tokens)),
        sums.pieces,
    ]
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=-1)


def fit(features: Floats, seconds: Floats) -> Floats:
    """Non-negative coefficients [C] that minimise the sum of ((features @ coefficients - seconds) / seconds)^2.

    features [R, C], seconds [R] above 0. A column of zeros gets 0. Raises ConfigError where scipy is missing.
    """
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise ConfigError(
            "a calibration is fitted with scipy, which is missing: pip install 'mmds[planning]'"
        ) from error

    relative = features / seconds[:, None]
    scale = np.abs(relative).max(axis=0)  # columns differ by many powers of ten
    scale[scale == 0] = 1.0
    found, _ = nnls(relative / scale, np.ones(len(seconds)))
    return np.asarray(found / scale, np.float64)


def fit_columns(features: Floats, seconds: Floats, columns: Sequence[int]) -> Floats:
    """As `fit`, with these columns alone; the coefficients of the others are 0."""
    found = np.zeros(features.shape[1])
    found[list(columns)] = fit(features[:, list(columns)], seconds)
    return found


def mape(predicted: Floats, seconds: Floats) -> float:
    """Mean of |predicted - seconds| / seconds, a share."""
    return float(np.mean(np.abs(predicted - seconds) / seconds))


def choose_columns(features: Floats, seconds: Floats) -> list[int]:
    """All rates, and those overheads that lower the error of rows left out of the fit, by cross-validation over these rows.

    features [R, COLUMNS], seconds [R].
    """
    rates = list(range(len(RATES)))
    extra = range(len(RATES), len(COLUMNS))
    best, least = rates, math.inf
    for count in range(len(OVERHEADS) + 1):
        for chosen in combinations(extra, count):
            columns = [*rates, *chosen]
            error = _cross_validated(features, seconds, columns)
            if error < least * (1 - GAIN):
                best, least = columns, error
    return best


def _cross_validated(features: Floats, seconds: Floats, columns: Sequence[int]) -> float:
    """Mean relative error of rows predicted by a fit on the other folds."""
    fold = np.arange(len(seconds)) % FOLDS
    predicted = np.zeros(len(seconds))
    for number in range(FOLDS):
        out = fold == number
        if out.any():
            predicted[out] = features[out] @ fit_columns(features[~out], seconds[~out], columns)
    return mape(predicted, seconds)
