"""timm's own weights, which the Hugging Face Hub has: fetched, or found in its cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

PATIENCE = 10  # seconds


@contextmanager
def fetching() -> Iterator[None]:
    """Asks the hub once if it is there; if not, only its cache counts, without a minute of further tries.

    Raises:
        ConnectionError: if the hub does not answer, and its cache lacks the weights.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers()
    try:
        yield
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if before else f"{constants.ENDPOINT} does not answer"
        raise ConnectionError(f"its weights are not in the hub's cache, and {why}") from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers() -> bool:
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE).close()
    except HTTPError:  # is an answer
        return True
    except (OSError, ValueError):
        return False
    return True
