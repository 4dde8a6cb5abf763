"""A deadline holds for the whole mesh: it travels with the request, and what is not done by then is dropped everywhere.

python -m examples.deadline ROUTER [SECONDS]
"""

import sys
import time

from pdmesh import errors
from pdmesh.client import Client, Delta


def main(router: str, seconds: float) -> None:
    """Takes what comes within `seconds`."""
    began, tokens = time.monotonic(), list[int]()
    with Client(router) as client:
        try:
            for event in client.generate_stream("Once upon a time", max_tokens=1000, ignore_eos=True, seed=7, timeout=seconds):
                if isinstance(event, Delta):
                    tokens += event.token_ids
        except errors.DeadlineExceeded as error:
            print(f"deadline after {time.monotonic() - began:.1f} s with {len(tokens)} tokens: {error.message}")
        else:
            print(f"complete after {time.monotonic() - began:.1f} s with {len(tokens)} tokens")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 1.0)
