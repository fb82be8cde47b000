"""Agreement on what a round produced. `door.py` is the narrow door; engines stand behind it."""
