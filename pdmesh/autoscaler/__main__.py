"""`python -m autoscaler`."""

from autoscaler.main import main

if __name__ == "__main__":
    main()
