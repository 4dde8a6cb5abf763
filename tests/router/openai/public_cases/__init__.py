"""Cases from public reports on servers with OpenAI's API: what each is about, where it was reported, and its right value."""
