"""Run `python -m pdmesh.simulator`, compiled if the compiled modules exist (pdmesh/simulator/compiled.py)."""

from pdmesh.simulator import compiled

if __name__ == "__main__":
    compiled.use()
    from pdmesh.simulator.main import main  # not earlier: modules imported before `use` stay interpreted

    raise SystemExit(main())
