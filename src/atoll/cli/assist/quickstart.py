def quickstart() -> None:
    """Q."""
