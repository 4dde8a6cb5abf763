"""A chat, printed as it comes; then the same question again without streaming: the same seed gives the same answer.

python -m examples.sync_stream ROUTER [QUESTION]
"""

import sys

from pdmesh.client import Client, Delta, Message, Started


def main(router: str, question: str) -> None:
    """Asks twice."""
    messages = [Message("system", "You answer in one sentence."), Message("user", question)]
    with Client(router) as client:
        seed, streamed = 0, ""
        for event in client.chat_stream(messages, max_tokens=32, timeout=60):
            if isinstance(event, Started):
                seed = event.seed
            elif isinstance(event, Delta):
                streamed += event.text
                print(event.text, end="", flush=True)
        print()
        again = client.chat(messages, max_tokens=32, seed=seed, timeout=60)
        print(f"seed {seed} again: {'the same' if again.text == streamed else 'something else'}")


if __name__ == "__main__":
    main(sys.argv[1], " ".join(sys.argv[2:]) or "What is the capital of France?")
