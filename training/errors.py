"""Errors that a person can act on: one sentence that names the thing, its value and what is allowed."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError

# What reading a folder raises beside ValueError and OSError, where files are broken or not what their names say.
BROKEN_FILES = (AttributeError, ImportError, LookupError, RuntimeError, SafetensorError, TypeError)


class UserError(ValueError):
    """What was given cannot be used; the message is one sentence. The command line exits with `exit_code`."""

    exit_code = 2


class Failure(UserError):
    """What was given is in order, but the work broke off: a lost connection, a full disk, a loss that diverged."""

    exit_code = 1


def unknown_name(what: str, name: str, allowed: Iterable[str]) -> UserError:
    """Return the error for a `name` that is none of `allowed`: it suggests the nearest, or lists them all."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"allowed are {', '.join(allowed)}"
    return UserError(f"{what} '{name}' is unknown: {hint}")


@contextmanager
def as_user_error(what: str, *more: type[Exception]) -> Iterator[None]:
    """Turn what a model, a configuration or a tokenizer refuses into a `UserError` that begins with `what`.

    Strict configurations wrap the reason in a heading of their own, which the sentence leaves out, and what follows a
    message's first line is advice at length.

    Args:
        more: kinds of errors that are no refusals, but mean that what is read is broken: `BROKEN_FILES`.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError, StrictDataclassError) as error:
        reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        if any(isinstance(cause, HFValidationError) for cause in _causes(error)):
            reason = "there is no such folder, and no repository can have this name"
        raise UserError(f"{what}: {_first_line(reason)}") from error
    except more as error:
        raise UserError(f"{what}: {type(error).__name__}: {_first_line(error)}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException | str) -> str:
    return str(error).strip().partition("\n")[0]
