"""The few error classes of mmds. Each message says what is wrong, where, and what to do."""

from __future__ import annotations


class MmdsError(ValueError):
    """Base of every error that a user can cause and mend."""


class ConfigError(MmdsError):
    """The configuration is wrong: names the file, the key path and the remedy."""


class DataError(MmdsError):
    """A sample, an image, a shard or a chat template is wrong: names file:line or key, and the reason."""


class StoreError(DataError):
    """An object store does not answer, or not as before: no sample is to blame, so none is skipped for it."""


class SpliceError(MmdsError):
    """Slots and visual tokens of one image disagree: names sample, image and both counts."""


class CheckpointError(MmdsError):
    """A checkpoint or model folder is missing, torn or does not fit: names the path and the remedy."""
