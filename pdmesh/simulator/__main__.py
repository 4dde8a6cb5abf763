"""`python -m simulator`: compiled where that was done (simulator/compiled.py)."""

from simulator import compiled

if __name__ == "__main__":
    compiled.use()
    from simulator.main import main  # not before: what is imported by then stays interpreted

    raise SystemExit(main())
