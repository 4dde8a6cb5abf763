"""`python -m simulator`: compiled where that was done (pdmesh/simulator/compiled.py)."""

from pdmesh.simulator import compiled

if __name__ == "__main__":
    compiled.use()
    from pdmesh.simulator.main import main  # not before: what is imported by then stays interpreted

    raise SystemExit(main())
