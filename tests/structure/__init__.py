"""What holds of the repository as a whole: its names, its parts."""
