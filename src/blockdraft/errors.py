"""The one exception tree.

    BlockdraftError
      ConfigError        a drafter configuration or a recipe cannot mean anything exact
      CheckpointError    files on disk are missing, damaged, left over or of another kind
      PairError          this draft does not fit this target
      RequestError       a request cannot be served as it was asked for
      UnavailableError   an extra, a device or a download that is needed is not there

A message is one line: what was given, what is allowed, what to do next.
The command line prints it and exits 2; any other exception is a fault of ours and keeps its traceback.
"""

from __future__ import annotations


class BlockdraftError(Exception):
    """Base of everything blockdraft raises on purpose."""


class ConfigError(BlockdraftError):
    """A configuration that cannot mean anything exact."""


class CheckpointError(BlockdraftError):
    """Files of a checkpoint that are missing, damaged, left over or of another kind."""


class PairError(BlockdraftError):
    """A draft and a target that do not fit each other."""


class RequestError(BlockdraftError):
    """A request that cannot be served as it was asked for."""


class UnavailableError(BlockdraftError):
    """An extra, a device or a download that is needed and not there."""


def shown(value: object, limit: int = 80) -> str:
    """A value from outside as it stands in a message: quoted, on one line, cut to `limit` characters."""
    text = str(value)
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
