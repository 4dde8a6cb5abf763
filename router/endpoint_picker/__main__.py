"""Run an endpoint picker: `python -m router.endpoint_picker`."""

from router.endpoint_picker.main import main

if __name__ == "__main__":
    main()
