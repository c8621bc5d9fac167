"""All exceptions of kvstrata, one tree.

    KVStrataError
    ├── ConfigError        a user's setting, file or case is unusable; the message names file, line or field
    ├── CapacityError      a size cannot be had (memory, disk); the message has the numbers
    ├── StateError         a caller broke the life cycle of a request, job or object
    └── InternalError      an invariant of kvstrata itself does not hold

What a tier, peer or file does is never an exception: it is a `FailCause` (types.py), and ends as a miss.
"""

from __future__ import annotations


class KVStrataError(Exception):
    """Base of all errors that kvstrata raises on purpose."""


class ConfigError(KVStrataError):
    """Bad input: one clear line that names the place. The command line exits with code 2."""


class CapacityError(KVStrataError):
    """Memory or disk that was asked for cannot be had."""


class StateError(KVStrataError):
    """A call that the life cycle does not allow at this point."""


class InternalError(KVStrataError):
    """A broken invariant of kvstrata itself; always a bug."""
