"""What the client library does by itself when routers go or refuse, and what is left to the caller.

python -m examples.retry ROUTER,ROUTER[,…]
"""

import sys

from pdmesh import errors
from pdmesh.client import Client, Completed, Delta, Started


def main(routers: str) -> None:
    """One answer through whatever happens; each token once."""
    # A router that is lost in the middle of a stream costs a pause: it goes on at the next one. `retry_overload` also waits while
    # the mesh is full, as long as it says; without it, Overloaded comes up at once and says when to come again.
    with Client(routers, resume_timeout_s=30, retry_overload=True) as client:
        tokens = list[int]()
        try:
            for event in client.generate_stream("Once upon a time", max_tokens=40, ignore_eos=True, seed=7, timeout=60):
                if isinstance(event, Started):
                    print(f"started with seed {event.seed}", flush=True)
                elif isinstance(event, Delta):
                    assert event.first_index == len(tokens) or not event.token_ids
                    tokens += event.token_ids
                    print(f"{len(tokens)} tokens", flush=True)
                elif isinstance(event, Completed):
                    print(f"complete; {event.num_resumes} routers were lost on the way")
            print("tokens:", *tokens)
        except errors.InvalidArgument as error:  # never tried again: the request is wrong
            raise SystemExit(f"{error.field}: {error.message}") from error
        except errors.Overloaded as error:  # here only if it does not fit at all
            raise SystemExit(f"no room: {error.message} (retry in {error.retry_delay_s} s)") from error
        except errors.Unavailable as error:  # no router within resume_timeout_s
            raise SystemExit(f"no router answers: {error.message}") from error


if __name__ == "__main__":
    main(sys.argv[1])
